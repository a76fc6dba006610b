"""Breaks the code in small ways, one at a time, and sees which tests fail: the kill matrix.

    python -m tools.mutants --seed 1 --count 10 --out matrix.jsonl ragcache/kv=tests/kv ragcache/codecs=tests/codecs

Each room gets `--count` mutants, drawn by the seed and mixed by kind. They are made in a copy of the tracked files, and
pytest runs there on the room's tests until one fails or the time is up. A line of `--out` is a mutant with the first
test that killed it; mutants that are in the file already are not run again. With coverage installed,

    python -m coverage run --source=ragcache -m pytest -n0 -p tools.mutants tests/kv

notes which test reaches which line in `.coverage`; with `--reach .coverage` those alone run.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from copy import deepcopy
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
TYPES = ("annotation", "returns")
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
    copy = deepcopy(node)
    vars(copy).update(fields)
    return f"({ast.unparse(copy)})"


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
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
    """The nodes that do something: no annotations, no texts of errors, nothing for the type checker alone."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.AST) and not isinstance(child, UNREAD) and name not in TYPES and not typing:
                yield from read(child)


def mutants(path: Path) -> Iterator[Mutant]:
    text = path.read_bytes()
    starts = [0, *(match.end() for match in re.finditer(rb"\n", text))]
    for node in read(ast.parse(text)):
        for kind, old, new in mutations(node):
            start = starts[old.lineno - 1] + old.col_offset  # type: ignore[attr-defined]
            end = starts[old.end_lineno - 1] + old.end_col_offset  # type: ignore[attr-defined]
            name = path.relative_to(ROOT).as_posix()
            yield Mutant(name, old.lineno, kind, text[start:end].decode(), new, start, end)  # type: ignore[attr-defined]


def drawn(room: Path, seed: int, count: int) -> list[Mutant]:
    """So many mutants of a room's files, with as many of each kind as there are to be had."""
    every = [mutant for path in (sorted(room.rglob("*.py")) or [room]) for mutant in mutants(path)]
    random.Random(seed).shuffle(every)
    kinds = [[mutant for mutant in every if mutant.kind == kind] for kind in sorted({mutant.kind for mutant in every})]
    return [mutant for mutant in chain.from_iterable(zip_longest(*kinds)) if mutant][:count]


def write(path: Path, text: bytes, modified: int) -> None:
    """Under a time of its own: a cached module is told from its source by seconds and size."""
    path.write_bytes(text)
    os.utime(path, (modified, modified))


def copied(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
    for made in ROOT.glob("*.egg-info"):  # the entry points of the annexes
        shutil.copytree(made, folder / made.name)


def run_tests(folder: Path, said: Path, tests: list[str]) -> int:
    """The status of pytest there; all that it says goes to a file."""
    os.setsid()
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.chdir(folder)
    sys.path[:] = [place.replace(str(ROOT), str(folder)) for place in [str(ROOT), *filter(None, sys.path)]]
    os.environ["PYTHONPATH"] = ":".join(sys.path)
    for name in [name for name in sys.modules if name.split(".")[0] == "tools"]:
        del sys.modules[name]
    early = "ignore::pytest.PytestAssertRewriteWarning"  # of plug-ins that the libraries have imported
    return pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", "-W", early, *tests])


def first_failure(folder: Path, tests: list[str], seconds: float) -> str | None:
    """The first of these tests that fails there, or None. A run that takes too long has failed."""
    said = folder / "said"
    pid = os.fork()  # the libraries are imported already
    if pid == 0:
        status = 1
        try:
            status = int(run_tests(folder, said, tests))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    end = time.monotonic() + seconds
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        time.sleep(0.05)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "time"
    if os.waitstatus_to_exitcode(ended[1]) in (0, 5):
        return None
    output = said.read_text(encoding="utf-8", errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed[1] if failed else output.strip().splitlines()[-1]


def reaching(reach: str | None, mutant: Mutant, tests: list[str]) -> list[str]:
    """The tests of these folders that reach the mutant's line, by what coverage noted; without that, all."""
    if reach is None:
        return tests
    from coverage import CoverageData  # type: ignore[import-not-found, unused-ignore]

    data = CoverageData(reach)
    data.read()
    measured = next((file for file in data.measured_files() if file.endswith("/" + mutant.file)), "")
    met = data.contexts_by_lineno(measured).get(mutant.line, [])
    return sorted(test for test in met if test.startswith(tuple(tests)))


def pytest_runtest_protocol(item: Any) -> None:
    """A plug-in of pytest: what coverage measures from here on belongs to this test, its cases taken together."""
    from coverage import Coverage  # type: ignore[import-not-found, unused-ignore]

    running = Coverage.current()
    if running is not None:
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
    kept = asked.out.read_text(encoding="utf-8").splitlines()
    done = {(row["file"], row["line"], row["before"], row["after"]) for row in map(json.loads, kept)}
    importlib.import_module("transformers.generation")
    with tempfile.TemporaryDirectory() as temporary, asked.out.open("a", encoding="utf-8") as out:
        folder, times = Path(temporary).resolve(), count(1_000_000_000)
        copied(folder)
        for room, tests in (pair.split("=") for pair in asked.rooms):
            for mutant in drawn(ROOT / room, asked.seed, asked.count):
                if (mutant.file, mutant.line, mutant.before, mutant.after) in done:
                    continue
                path, began = folder / mutant.file, time.monotonic()
                whole = path.read_bytes()
                change = whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :]
                tried = reaching(asked.reach, mutant, tests.split(","))
                write(path, change, next(times))
                killer = first_failure(folder, tried, asked.seconds) if tried else None
                write(path, whole, next(times))
                row = {**mutant._asdict(), "tests": len(tried), "killed": killer}
                del row["start"], row["end"]
                print(json.dumps({**row, "seconds": round(time.monotonic() - began, 1)}), file=out, flush=True)


if __name__ == "__main__":
    main()
