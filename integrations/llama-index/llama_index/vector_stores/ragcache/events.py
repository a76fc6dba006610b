"""What a search reports to LlamaIndex's instrumentation."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent

import ragcache as rc

dispatcher = get_dispatcher(__name__)


class RagCacheRetrievalEvent(BaseEvent):
    """A search of the store, beside LlamaIndex's own retrieval events.

    k:          passages asked for
    scores:     inner products of those found, best first
    with_kv:    of those found, passages whose KV is computed already
    retrieve_s: seconds, embedding the question included where the store did that
    """

    k: int
    scores: list[float]
    with_kv: int
    retrieve_s: float

    @classmethod
    def class_name(cls) -> str:
        return "RagCacheRetrievalEvent"


def tell_of_search(k: int, hits: Sequence[rc.Hit], started: float) -> None:
    """started: `time.perf_counter()` before the search."""
    taken = time.perf_counter() - started
    ready = sum(hit.handle is not None for hit in hits)
    dispatcher.event(RagCacheRetrievalEvent(k=k, scores=[hit.score for hit in hits], with_kv=ready, retrieve_s=taken))
