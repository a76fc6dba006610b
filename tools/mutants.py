"""Breaks the code in small ways, one at a time, and sees which tests fail: the kill matrix.

    python -m tools.mutants --seed 1 --count 10 --out matrix.jsonl ragcache/kv=tests/kv ragcache/codecs=tests/codecs

Each room gets `--count` mutants, drawn by the seed and mixed by kind, in a copy of the tracked files; pytest runs there
on the room's tests until one fails. A line of `--out` is a mutant with the first test that killed it; mutants that are
in the file already are not run again. With coverage installed, `python -m coverage run --source=ragcache -m pytest -n0
-p tools.mutants tests/kv` notes which test reaches which line; with `--reach .coverage` those tests alone run.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
UNREAD = (ast.JoinedStr, ast.Raise, ast.Assert)  # texts of errors; places inside f-strings are wrong before Python 3.12


class Mutant(NamedTuple):
    """One change of one expression or statement; `start` and `end` are byte offsets of what is replaced."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int


def changed(node: Any, **fields: object) -> str:
    return f"({ast.unparse(type(node)(**{**vars(node), **fields}))})"


def mutations(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    """What can be broken at a node: the kind, what is replaced, and by what."""
    match node:
        case ast.Compare(ops=[op, *rest]) if type(op) in COMPARISONS:
            yield "comparison", node, changed(node, ops=[COMPARISONS[type(op)](), *rest])
        case ast.BoolOp(op=op):
            yield "condition", node, changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign", node, changed(operand)
        case ast.BinOp(op=op) if type(op) in SIGNS:
            yield "sign", node, changed(node, op=SIGNS[type(op)]())
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", node, repr(value * 2 or 1.0)
        case ast.Slice():
            for bound in filter(None, (node.lower, node.upper)):
                yield "off by one", bound, f"({ast.unparse(bound)} + 1)"
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(a, ast.Starred) for a in (first, second)):
            yield "swapped argument", node, changed(node, args=[second, first, *rest])
        case ast.Expr(value=ast.Call(func=called)) if not ast.unparse(called).startswith("log."):
            yield "dropped call", node, "pass"


def read(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that do something: no annotations and no texts of errors."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, UNREAD) and name not in ("annotation", "returns"):
                yield from read(child)


def mutants(path: Path) -> Iterator[Mutant]:
    text, name = path.read_bytes(), path.relative_to(ROOT).as_posix()
    starts = [0, *(match.end() for match in re.finditer(rb"\n", text))]
    for node in read(ast.parse(text)):
        for kind, old, new in mutations(node):
            start, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            yield Mutant(name, old.lineno, kind, text[start:end].decode(), new, start, end)


def drawn(room: Path, seed: int, count: int) -> list[Mutant]:
    """So many mutants of a room's files, with as many of each kind as there are to be had."""
    every = [mutant for path in (sorted(room.rglob("*.py")) or [room]) for mutant in mutants(path)]
    random.Random(seed).shuffle(every)
    kinds = [[mutant for mutant in every if mutant.kind == kind] for kind in sorted({mutant.kind for mutant in every})]
    return [mutant for mutant in chain.from_iterable(zip_longest(*kinds)) if mutant][:count]


def write(path: Path, text: bytes, modified: int) -> None:
    path.write_bytes(text)
    os.utime(path, (modified, modified))  # a cached module is told from its source by seconds and size


def copied(folder: Path) -> None:
    """The tracked files, and the entry points of the annexes."""
    copy = 'git ls-files -z | xargs -0 cp -P -r --parents -t "$0" && cp -r ./*.egg-info "$0"'
    subprocess.run(["bash", "-c", copy, folder], cwd=ROOT, check=True)


def run_tests(folder: Path, tests: list[str]) -> int:
    """The status of pytest there; all that it says goes to a file."""
    os.setsid()
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.chdir(folder)
    sys.path[:] = [place.replace(str(ROOT), str(folder)) for place in [str(ROOT), *filter(None, sys.path)]]
    os.environ["PYTHONPATH"] = ":".join(sys.path)
    for name in [name for name in sys.modules if name.split(".")[0] == "tools"]:
        del sys.modules[name]
    early = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plug-ins that the libraries have imported
    status = pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", *early, *tests])
    sys.stdout.flush()
    return int(status)


def first_failure(folder: Path, tests: list[str], seconds: float) -> str | None:
    """The first of these tests that fails there, or None. A run that takes too long has failed."""
    pid, end = os.fork(), time.monotonic() + seconds  # the libraries are imported already
    if pid == 0:
        try:
            os._exit(run_tests(folder, tests))
        finally:
            os._exit(1)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        time.sleep(0.05)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "time"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", (folder / "said").read_text(errors="replace"), re.MULTILINE)
    return None if os.waitstatus_to_exitcode(ended[1]) in (0, 5) else failed[1] if failed else "no report"


def reaching(reach: str | None, mutant: Mutant, tests: list[str]) -> list[str]:
    """The tests of these folders that reach the mutant's line, by what coverage noted; without that, all."""
    if reach is None:
        return tests
    (data := importlib.import_module("coverage").CoverageData(reach)).read()
    measured = next((file for file in data.measured_files() if file.endswith("/" + mutant.file)), "")
    met = data.contexts_by_lineno(measured).get(mutant.line, [])
    return sorted(test for test in met if test.startswith(tuple(tests)))


def pytest_runtest_protocol(item: Any) -> None:
    """A plug-in of pytest: what coverage measures from here on belongs to this test, its cases taken together."""
    if (running := importlib.import_module("coverage").Coverage.current()) is not None:
        running.switch_context(item.nodeid.split("[")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="+", metavar="ROOM=TESTS", help="a folder or file, and its tests with commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10, help="mutants of a room")
    parser.add_argument("--seconds", type=float, default=600.0, help="the longest that the tests of a mutant may take")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--reach", help="coverage's data: the tests that reach a line")
    asked = parser.parse_args()
    asked.out.touch()
    done = {tuple(json.loads(line).values())[:5] for line in asked.out.read_text(encoding="utf-8").splitlines()}
    importlib.import_module("transformers.generation")
    with tempfile.TemporaryDirectory() as temporary, asked.out.open("a", encoding="utf-8") as out:
        folder, times = Path(temporary).resolve(), count(1_000_000_000)
        copied(folder)
        for room, tests in (pair.split("=") for pair in asked.rooms):
            for mutant in drawn(ROOT / room, asked.seed, asked.count):
                if mutant[:5] in done:
                    continue
                path, began = folder / mutant.file, time.monotonic()
                whole, tried = path.read_bytes(), reaching(asked.reach, mutant, tests.split(","))
                write(path, whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :], next(times))
                killer = first_failure(folder, tried, asked.seconds) if tried else None
                write(path, whole, next(times))
                row = {"tests": len(tried), "killed": killer, "seconds": round(time.monotonic() - began, 1)}
                print(json.dumps(dict(zip(Mutant._fields, mutant[:5])) | row), file=out, flush=True)  # noqa: B905


if __name__ == "__main__":
    main()
