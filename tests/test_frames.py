"""How many of the package's frames a call passes: a number for each way, which the commit that shortens the way lowers.

A frame is a function of `ragcache/` on the stack of one thread; a generator is one. Comprehensions do not count: Python
3.12 has no frames of them.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ragcache as rc
from ragcache.engine.keys import Key
from ragcache.fusion.method import Placer
from ragcache.models.scheduler import Scheduler
from ragcache.store.kv_store import KVStore
from ragcache_demo.bag_of_words import BagOfWords

PACKAGE = f"{Path(rc.__file__).parent}/"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
ENDS = {"scheduler": (Scheduler, "run"), "placer": (Placer, "place"), "store": (KVStore, "fetch")}
"""The functions of the package where ways end, themselves counted. One more end is the model's first layer."""

FRAMES = {
    "question to scheduler": 8,  # on the caller's thread; the plan has 8
    "question to model": 3,  # on the model's thread, from here on; the plan has 3
    "question to placer": 6,  # the plan has 6
    "question to store": 6,  # a block of a question, on the caller's thread; the plan has 6
    "ingestion to model": 8,  # 8
}
"""The longest way of each kind today."""


def ours() -> list[str]:
    """The package's frames on this thread, outermost first, without this module's."""
    frames, frame = [], sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            frames.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}")
        frame = frame.f_back
    return frames[::-1]


class Longest(dict[str, list[str]]):
    """The longest stack that was seen at each end."""

    def see(self, end: str, frames: list[str]) -> None:
        if len(frames) > len(self.get(end, ())):
            self[end] = frames


@contextmanager
def watched(lm: rc.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Longest]:
    """Looks at the stack whenever a call comes to one of the ends."""
    found = Longest()
    with monkeypatch.context() as patch:
        for end, (owner, name) in ENDS.items():
            patch.setattr(owner, name, _looking(getattr(owner, name), end, found))
        with lm.model.get_decoder().register_forward_pre_hook(lambda *_: found.see("model", ours())):
            yield found


def _looking(function: Callable[..., Any], end: str, found: Longest) -> Callable[..., Any]:
    @functools.wraps(function)
    def look(*args: Any, **options: Any) -> Any:
        found.see(end, [*ours(), function.__qualname__])
        return function(*args, **options)

    return look


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The longest stack of every way over two passages in memory, and of a question's ways where it comes by a key."""
    found: list[dict[str, list[str]]] = []
    lm = rc.load_lm("mini")
    path = tmp_path_factory.mktemp("frames") / "kb"
    documents = [rc.Document("a", "Jonas Lansen wears a green hat."), rc.Document("b", "The river Ula is long.")]
    with (
        pytest.MonkeyPatch.context() as patch,
        rc.RagCache.open(path, model=lm, embedder=BagOfWords(), method="reposition") as kb,
    ):
        with watched(lm, patch) as ingestion:
            kb.ingest(documents)
        own = frozenset(["default"])
        for view in (kb, kb.as_key(Key("reader", reads=own, writes=own))):
            with watched(lm, patch) as question:
                answer = view.ask("Who wears a hat?", k=2, sampling=rc.Sampling(max_tokens=2))
            assert {source.kv for source in answer.hits} == {"memory"}
            found.append({f"question to {end}": frames for end, frames in question.items()})
    return found[0] | {"ingestion to model": ingestion["model"]}, found[1]


def lengths(ways: dict[str, list[str]]) -> dict[str, int]:
    return {way: len(frames) for way, frames in ways.items()}


def test_no_way_is_longer_than_it_was(measured):
    """A number that falls is lowered above."""
    ways, _ = measured
    assert lengths(ways) == FRAMES, "\n\n".join("\n".join([way, *frames]) for way, frames in ways.items())


def test_a_key_makes_no_way_longer(measured):
    without, by_key = map(lengths, measured)
    assert by_key == {way: without[way] for way in by_key}
    assert by_key.keys() == without.keys() - {"ingestion to model"}
