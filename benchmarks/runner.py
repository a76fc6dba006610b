"""Run a benchmark: parse its settings, record its environment, write its result.

    python -m benchmarks                                   # list the benchmarks
    python -m benchmarks ttft --set shape=toy --set rounds=2
    python -m benchmarks answers --model DIR --data DIR --sets nq10 hotpotqa

A benchmark is a module with a dataclass `Settings` and a function `measure(settings, run)` that returns a Result, or
yields a Result each time that more was measured. `--set key=value` and `--key value` are the same; a setting that is a
list takes several values. NAME.json and NAME.md are written to --out, and NAME.png if `benchmarks.plots` draws the
benchmark. The same command continues a killed run from NAME.journal.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import torch

from benchmarks.environment import Environment, environment, settle
from benchmarks.journal import Journal
from benchmarks.report import MOST_LOAD, RESULTS, Goal, Result, page, write
from ragcache.errors import ConfigError, RagCacheError

NAMES = (
    *("answers", "askers", "decode", "gpu", "ingest", "llamacpp", "methods", "peers"),
    *("reuse", "ttft", "vllm_placing", "week"),
)


class Run:
    """A run's settings, environment and directories, which the runner passes to the benchmark.

    workdir: an empty directory that is removed afterwards; out: the directory of the result
    name:    name of the result's files, if the command names them
    """

    def __init__(
        self,
        benchmark: str,
        settings: Any,
        environment: Environment,
        workdir: Path,
        out: Path,
        name: str = "",
        journal: Path | None = None,
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.workdir = workdir
        self.out = out
        self.name = name or getattr(settings, "name", "") or benchmark
        self.journal_path = journal or out / f"{self.name}.journal.jsonl"

    @cached_property
    def journal(self) -> Journal:
        """Return the figures of this run and of earlier runs that were killed."""
        return Journal(self.journal_path, asdict(self.settings), self.environment)

    def result(
        self,
        timings: Mapping[str, Any] | None = None,
        ratios: Mapping[str, Any] | None = None,
        figures: Mapping[str, Any] | None = None,
        goals: Sequence[Goal] = (),
        **changed: Any,
    ) -> Result:
        """Return the result of this run. changed: further fields of Result"""
        where = self.journal.environment() if "journal" in self.__dict__ else self.environment
        found = Result(self.name, self.settings, where, timings or {}, ratios or {}, figures or {}, goals)
        return replace(found, **changed)


def command(arguments: Sequence[str]) -> int:
    """Run the benchmark that `arguments` name, or list all; return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        for name in NAMES:
            print(f"{name:<14}{(module_of(name).__doc__ or '').splitlines()[0]}")
        return 0
    try:
        main(arguments[0], arguments[1:])
    except RagCacheError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


def module_of(name: str) -> ModuleType:
    """Return the module of a benchmark. Raises ConfigError, which names all benchmarks, for an unknown name."""
    if name not in NAMES:
        raise ConfigError(f"there is no benchmark {name!r}; choose one of {', '.join(NAMES)}")
    return import_module(f"benchmarks.{name}")


def main(name: str, arguments: Sequence[str] = ()) -> Result:
    """Run a benchmark, write each result that it yields, print the last page, and return the last result."""
    module = module_of(name)
    settings, given = parse(module, name, arguments)
    if threads := getattr(settings, "threads", 0):
        torch.set_num_threads(threads)
    if given.settle and not settle(MOST_LOAD, given.settle):
        print(f"the load does not fall to {MOST_LOAD:g}: goals will not be decided", file=sys.stderr)
    where = environment(name, arguments, torch.device(getattr(settings, "device", "cpu")))
    if given.workdir is not None:
        given.workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.workdir, prefix=f"{name}-") as workdir:
        run = Run(name, settings, where, Path(workdir), given.out, given.name or "", given.journal)
        for result in _results(module.measure(settings, run)):
            text = _write(module, result, given.out)
    if "journal" in run.__dict__:
        run.journal.remove()
    print(text)
    return result


def _results(measured: Result | Iterator[Result]) -> Iterator[Result]:
    if isinstance(measured, Result):
        yield measured
    else:
        yield from measured


def _write(module: ModuleType, result: Result, out: Path) -> str:
    """Write the result as JSON, page and picture; return the page."""
    path = write(result, out)
    found = json.loads(path.read_text(encoding="utf-8"))
    text = "\n".join(getattr(module, "markdown", page)(found)) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    if find_spec("matplotlib") is not None:  # of the extra `bench`
        from benchmarks.plots import DRAWN, save

        if (draw := DRAWN.get(module.__name__.rpartition(".")[2])) is not None:
            save(draw(found), path.with_suffix(".png"))
    return text


def parse(module: ModuleType, name: str, arguments: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Return the benchmark's settings and the runner's own options. Exits with status 2 for unknown options."""
    parser = argparse.ArgumentParser(
        f"benchmarks {name}",
        description=f"{module.__doc__}\nSettings:\n\n{module.Settings.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    own = parser.add_argument_group("settings, each also as --set key=value")
    hints = get_type_hints(module.Settings)
    for one in fields(module.Settings):
        own.add_argument(f"--{one.name.replace('_', '-')}", **_option(hints[one.name], one))
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", help="a setting")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result is written")
    parser.add_argument("--name", help="of the result's files")
    parser.add_argument("--journal", type=Path, help="default: NAME.journal.jsonl in --out")
    parser.add_argument("--workdir", type=Path, help="where stores are written; a disk, not tmpfs")
    parser.add_argument("--settle", type=float, default=0, metavar="SECONDS", help="wait for a quiet machine, at most")
    given = parser.parse_args(_spelt_out(arguments))
    try:
        return module.Settings(**{one.name: getattr(given, one.name) for one in fields(module.Settings)}), given
    except ConfigError as error:
        parser.error(str(error))


def _spelt_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--set key=value` as `--key=value`."""
    found, left = list[str](), iter(arguments)
    for argument in left:
        if argument == "--set" and (value := next(left, None)) is not None:
            argument = f"--set={value}"
        if argument.startswith("--set="):
            key, _, value = argument.removeprefix("--set=").partition("=")
            argument = f"--{key.replace('_', '-')}={value}"
        found.append(argument)
    return found


class _Extend(argparse.Action):
    """Collect the values of a list; the first replaces the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        given = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (*(() if given is self.default else given), *values))


def _option(kind: Any, field: Any) -> dict[str, Any]:
    """Return argparse's description of a field of a settings dataclass, from its type and default."""
    needed = field.default is MISSING
    option: dict[str, Any] = {"required": True} if needed else {"default": field.default, "help": f"({field.default})"}
    kinds = [one for one in get_args(kind) if one not in (type(None), Ellipsis)]
    if isinstance(field.default, tuple):
        return {**option, "nargs": "+", "type": kinds[0], "action": _Extend}
    kind = kinds[0] if kinds else kind
    if kind is bool:
        return {**option, "nargs": "?", "const": True, "type": lambda text: text.lower() in ("1", "true", "yes")}
    return {**option, "type": kind}
