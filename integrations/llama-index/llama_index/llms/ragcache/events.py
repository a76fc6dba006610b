"""What an answer reports to LlamaIndex's instrumentation while it is made."""

from __future__ import annotations

import time
from collections import Counter

from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.span import active_span_id

import ragcache as rc

dispatcher = get_dispatcher(__name__)


class RagCacheKVLoadEvent(BaseEvent):
    """The passages' KV blocks are there, before anything is read.

    ids:      of the passages, in the order of the prompt
    handles:  names of their blocks
    origins:  passages by where their KV came from: "memory", "disk", "computed" (now), "shared" (with another one),
              "unused", "exact" (under full)
    tokens:   of the passages
    elapsed_s: seconds since the question was asked
    """

    ids: list[str]
    handles: list[str | None]
    origins: dict[str, int]
    tokens: int
    elapsed_s: float

    @classmethod
    def class_name(cls) -> str:
        return "RagCacheKVLoadEvent"


class RagCacheFirstTokenEvent(BaseEvent):
    """The first text of the answer is there. ttft_s: seconds since the question was asked."""

    ttft_s: float

    @classmethod
    def class_name(cls) -> str:
        return "RagCacheFirstTokenEvent"


class RagCachePrefillEvent(BaseEvent):
    """What the fused prefill cost, sent with the end of the answer, when all figures are known.

    method: the fusion method; method_reason: why this one; dropped: passages that did not fit and were left out;
    dropped_turns: oldest messages that were
    tokens and seconds: see `ragcache.Usage` and `ragcache.Timings`
    """

    method: str
    method_reason: str
    dropped: int
    dropped_turns: int
    prompt_tokens: int
    cached_tokens: int
    created_tokens: int
    computed_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    queue_s: float
    load_s: float
    encode_s: float
    place_s: float
    prefill_s: float
    ttft_s: float
    total_s: float

    @classmethod
    def class_name(cls) -> str:
        return "RagCachePrefillEvent"


class Watch:
    """Reports one answer's events, under the span in which it was asked for."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._span_id = active_span_id.get()
        self._waiting = True

    def see(self, event: rc.Sources | rc.Reasoning | rc.Token | rc.ToolCall | rc.Done) -> None:
        if isinstance(event, rc.Sources):
            self._loaded(event)
        elif isinstance(event, rc.Done):
            self._done(event.answer)
        else:
            self._token()

    @property
    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def _loaded(self, event: rc.Sources) -> None:
        if event.hits:
            self._tell(
                RagCacheKVLoadEvent(
                    ids=[source.chunk.id for source in event.hits],
                    handles=[source.handle for source in event.hits],
                    origins=dict(Counter(source.kv for source in event.hits)),
                    tokens=sum(source.chunk.num_tokens for source in event.hits),
                    elapsed_s=self._elapsed_s,
                )
            )

    def _token(self) -> None:
        if self._waiting:
            self._waiting = False
            self._tell(RagCacheFirstTokenEvent(ttft_s=self._elapsed_s))

    def _done(self, answer: rc.Answer) -> None:
        usage, timings = answer.usage, answer.timings
        self._tell(
            RagCachePrefillEvent(
                method=answer.method,
                method_reason=answer.method_reason,
                dropped=answer.dropped,
                dropped_turns=answer.dropped_turns,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                created_tokens=usage.created_tokens,
                computed_tokens=usage.computed_tokens,
                completion_tokens=usage.completion_tokens,
                reasoning_tokens=usage.reasoning_tokens,
                queue_s=timings.queue_s,
                load_s=timings.load_s,
                encode_s=timings.encode_s,
                place_s=timings.place_s,
                prefill_s=timings.prefill_s,
                ttft_s=timings.ttft_s,
                total_s=timings.total_s,
            )
        )

    def _tell(self, event: BaseEvent) -> None:
        event.span_id = self._span_id
        dispatcher.event(event)
