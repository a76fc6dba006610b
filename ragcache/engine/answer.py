"""Answers of the engine, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ragcache.models.tool_calls import ToolCall
from ragcache.store.records import Chunk

Why = Literal["found", "never stored", "evicted", "another model", "differs", "method cannot"]


@dataclass(frozen=True)
class Source:
    """A passage that an answer was read from.

    score:  inner product with the question
    handle: key of the chunk's KV block
    kv:     origin of its KV: a tier ("device", "memory", "disk" or "remote"); "computed" now; "shared" (another
            question had placed the same passages); "unused" (full prefill reads the text); or "exact" (the prefix tree
            had its KV at this position, from an earlier prompt)
    """

    chunk: Chunk
    score: float
    handle: str | None
    kv: str

    @property
    def tier(self) -> str | None:
        """Return where the KV was read from, or None if it was computed, or not needed."""
        return None if self.kv in ("computed", "unused") else self.kv


@dataclass(frozen=True)
class Timings:
    """Seconds by phase.

    queue_s:    waiting for memory and, in a server, for a slot, from the request's arrival
    retrieve_s: embedding the question and searching
    load_s:     reading blocks from the KV store
    encode_s:   computing blocks that were in no tier
    place_s:    rotating and copying blocks into place
    prefill_s:  the forward pass of the suffix (or of everything, under `full`)
    ttft_s:     from the question to the first token of the answer
    total_s:    from the question to the last token
    """

    queue_s: float
    retrieve_s: float
    load_s: float
    encode_s: float
    place_s: float
    prefill_s: float
    ttft_s: float
    total_s: float

    def behind(self, queue_s: float) -> Timings:
        """Return these timings with `queue_s` added: seconds that the question waited before it reached the engine."""
        times = {"queue_s": self.queue_s, "ttft_s": self.ttft_s, "total_s": self.total_s}
        return replace(self, **{name: seconds + queue_s for name, seconds in times.items()})


@dataclass(frozen=True)
class Usage:
    """Token counts, as OpenAI counts them. Cached, created and computed tokens add up to the prompt's; see
    `TokenCounts`.

    prompt_tokens:     the whole prompt, with the tokens that the method added (link tokens, markers)
    cached_tokens:     tokens whose KV was loaded, in proportion to the layers in which they did not run
    completion_tokens: of the answer, its thoughts included
    created_tokens:    tokens whose KV was in no tier and was encoded for this question
    computed_tokens:   tokens that the model ran for this question, mean over its layers: the suffix, and the tokens
                       that the method adds or recomputes
    reasoning_tokens:  of completion_tokens, those of the model's thoughts
    pinned_tokens:     first tokens of the prompt whose KV is kept from eviction (`ChatOptions.pins`)
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    created_tokens: int = 0
    computed_tokens: int = 0
    reasoning_tokens: int = 0
    pinned_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token from the model's own distribution.

    That is before temperature, top_k, top_p, penalties, and a grammar that restricts the answer.

    text: the text that the token adds; bytes of an incomplete character are shown as U+FFFD
    logprob: NaN for a prompt's first token, which has no predecessor
    top:  the likeliest tokens at this position, the likeliest first; their own `top` is empty
    """

    id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Reason:
    """Why a passage is, or is not, read from stored KV.

    passage: id of the passage; for text without an id, how it begins
    why:     "another model": its KV is of another model, recipe, system prompt or collection
    detail:  the tier of the KV, the method's reason, or both texts around the token that differs
    place:   number of the passage's first token that differs; -1: none
    """

    passage: str
    why: Why
    detail: str = ""
    place: int = -1


@dataclass(frozen=True)
class Answer:
    """An answer with its sources, times and token counts.

    text: the answer's text
    hits: the passages that it was read from, best first, and pieces learnt from earlier prompts (`chunk.is_learnt`)
    method: the fusion method that read the prompt, with the options that differ from its defaults
    method_reason: why this method read it, and what the user may do next
    dropped: retrieved passages that did not fit the model's context and were left out (on_overflow="trim")
    finish_reason: "stop" (end of text, stop string or stop token), "length", or "tool_calls" (the answer has some)
    logprobs: of every token, including those of a stop string; None if `Sampling.logprobs` did not request them
    tool_calls: calls of tools, which are not part of the text
    reasoning: the model's thoughts before the answer, which are not part of the text either
    dropped_turns: oldest messages of the conversation that did not fit and were left out (drop_turns)
    stop: the stop string that ended the answer; "": none
    reasons: the function that `explain` calls
    """

    text: str
    hits: list[Source]
    timings: Timings
    usage: Usage
    method: str
    dropped: int = 0
    finish_reason: str = "stop"
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    method_reason: str = ""
    reasoning: str = ""
    dropped_turns: int = 0
    stop: str = ""
    reasons: Callable[[], Sequence[Reason]] = field(default=tuple, repr=False, compare=False)

    def explain(self) -> list[Reason]:
        """Say for each passage of the prompt why it was, or was not, read from stored KV; see `RagCache.why`. The store
        must be open. Raises StoreError."""
        return list(self.reasons())

    def to_json(self) -> dict[str, Any]:
        """Return all fields but `reasons` as JSON values, the hits as `sources_to_json` writes them."""
        value = asdict(replace(self, hits=[], reasons=tuple))  # asdict would copy the store that `reasons` holds
        del value["reasons"]
        lists = {name: list(items) for name, items in value.items() if isinstance(items, tuple)}
        return value | lists | {"hits": sources_to_json(self.hits)}


def sources_to_json(hits: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the sources of an answer as JSON values. Pieces learnt from prompts, the callers' own words, are left
    out."""
    return [_source_to_json(hit) for hit in hits if not hit.chunk.is_learnt]


def _source_to_json(source: Source) -> dict[str, Any]:
    chunk = source.chunk
    return {
        "chunk_id": chunk.id,
        "document_id": chunk.document_id,
        "title": chunk.title,
        "source": chunk.source,
        "place": chunk.place,
        "text": chunk.text,
        "metadata": chunk.metadata,
        "tokens": len(chunk.token_ids),
        "score": source.score,
        "handle": source.handle,
        "kv": source.kv,
    }


@dataclass(frozen=True)
class Sources:
    """First event of a stream, before the prompt is read: the passages, and the method that will read them.

    hits, method, method_reason: as in `Answer`
    """

    hits: list[Source]
    method: str = ""
    method_reason: str = ""


@dataclass(frozen=True)
class Token:
    """A piece of the answer's text, with the log-probabilities of the tokens since the previous piece, if requested."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's thoughts before it answers."""

    text: str


@dataclass(frozen=True)
class Done:
    """Last event of a stream: the whole answer."""

    answer: Answer


Event = Sources | Reasoning | Token | ToolCall | Done
