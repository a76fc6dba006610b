"""What docs/architecture.md says of types, threads and calls: the classes exist, the threads have these names, and a
question and a document pass the calls of the two traces in their order, each on its thread."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ragcache"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CALLER = "the caller's"


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_ten_types_are_classes_of_their_files():
    rows = re.findall(r"^- `(\w+)` \(`([\w/]+)\.py`\): \S", section("Ten types"), re.M)
    assert len(rows) == 10
    for name, module in rows:
        owner = importlib.import_module(f"ragcache.{module.replace('/', '.')}")
        assert getattr(owner, name).__module__ == owner.__name__


def test_every_thread_of_the_package_is_in_the_table():
    named = re.findall(r"`(ragcache-[\w-]+)`", section("Which thread owns what"))
    remotes = PACKAGE.parent / "integrations" / "remote"
    sources = [path.read_text(encoding="utf-8") for folder in (PACKAGE, remotes) for path in folder.rglob("*.py")]
    started = {name for text in sources for name in re.findall(r'name(?:_prefix)?="(ragcache-[\w-]+)"', text)}
    assert set(named) == started


Calls = dict[str, list[str]]
"""By thread, every call of the package's functions in order: `file:qualified name`."""


class Recorder:
    """Writes down calls, of this thread and of those that begin, until it is stopped."""

    def __init__(self) -> None:
        self.calls: Calls = defaultdict(list)
        self._caller = threading.current_thread()

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self.calls

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{PACKAGE}/"):
            thread = threading.current_thread()
            name = CALLER if thread is self._caller else re.sub(r"_\d+$", "", thread.name)
            self.calls[name].append(f"{path.removeprefix(f'{PACKAGE}/')}:{frame.f_code.co_qualname}")


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, Calls]:
    """By title of the trace: of an ingestion of two files, and of a question that is not the model's first."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_text("Jonas Lansen wears a green hat.", encoding="utf-8")
    (folder / "b.md").write_text("# Ula\n\nThe river Ula is long.", encoding="utf-8")
    store = tmp_path_factory.mktemp("store") / "kb"
    two = rc.Sampling(max_tokens=2)
    with rc.RagCache.open(store, model=rc.load_lm("mini"), embedder=BagOfWords(), method="reposition") as kb:
        with Recorder() as ingestion:
            kb.ingest([folder])
        with Recorder() as question:  # with the thread of the model, which begins here
            kb.ask("Who wears a hat?", k=1, sampling=two)
            for made in question.values():
                made.clear()
            kb.ask("What is long?", k=1, sampling=two)
    return {"A question, call by call": question, "A document, call by call": ingestion}


def stated(title: str) -> list[tuple[str, str]]:
    """Each line's thread and call."""
    form = r"^(\d+)\. `([\w.]+)` \(`([\w/]+\.py)`(?:, `([\w-]+)`)?\): \S"
    lines = re.findall(form, section(title), re.M)
    assert [int(line[0]) for line in lines] == list(range(1, 1 + len(re.findall(r"^\d+\. ", section(title), re.M))))
    return [(thread or CALLER, f"{file}:{name}") for _, name, file, thread in lines]


@pytest.mark.parametrize("title", ["A question, call by call", "A document, call by call"])
def test_a_trace_is_what_happens(calls, title):
    left = {thread: iter(made) for thread, made in calls[title].items()}
    for thread, call in stated(title):
        assert call in left[thread], f"{call} does not follow in {thread}"  # takes it and all before it
