"""Explains a question that is planned, but not read: no passage is loaded, computed or changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ragcache.engine.answer import Reason
from ragcache.engine.assemble import Components
from ragcache.engine.caches.passage_finder import PassageFinder
from ragcache.engine.loader import Prefetch
from ragcache.engine.options import DEFAULT_K
from ragcache.engine.questions import Questions
from ragcache.engine.request import Clock, Request
from ragcache.engine.why import explain_read


class _Planned(Questions):
    """Questions whose prompts are made, but not read: `ask` and `chat` yield the Request instead of events."""

    def _answers(
        self, prepare: Callable[[Clock], Request], ahead: Prefetch | None, *, learns: bool = True
    ) -> Iterator[Any]:
        try:
            yield prepare(Clock(time.perf_counter()))
        finally:
            if ahead is not None:
                ahead.close()


def explain(
    parts: Components, finder: PassageFinder, asked: str | Sequence[Mapping[str, Any]], keywords: Any
) -> list[Reason]:
    """Return a reason for each passage of the prompt, then for each stored passage that its text nearly holds.

    finder: the finder of the store's own questions, so that its index of passages is not built again

    Raises the errors of `RagCache.ask` and `RagCache.chat`.
    """
    questions = _Planned(parts)
    questions.finder = finder
    events: Iterator[Any] = (
        questions.ask(asked, keywords.get("k", DEFAULT_K), keywords)
        if isinstance(asked, str)
        else questions.chat(asked, keywords)
    )
    request = next(events)
    keys = parts.block_keys.keys([hit.chunk for hit in request.hits])
    there = parts.store.kv.lookup(keys)
    tiers = [there[key].tier if key in there else None for key in keys]
    read = [(hit.chunk, tier) for hit, tier in zip(request.hits, tiers, strict=True)]
    return explain_read(parts, request.prompt, request.options.choice, read)
