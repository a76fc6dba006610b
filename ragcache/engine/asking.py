"""One question, from its text to the last token of its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ragcache.engine.answer import Answer, Done, Event, Source, Sources, Timings, Token, Usage
from ragcache.engine.blocks import LoadedBlocks, load_or_compute
from ragcache.errors import ConfigError, ContextTooLongError
from ragcache.fusion.base import FusionMethod
from ragcache.fusion.fuse import Fused, fuse
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.models.decoding import Sampling, TextStream, decode, eos_token_ids
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt, PromptFormat
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore

OVERFLOWS = ("error", "trim")
UNUSED = "unused"


class Reader:
    """Answers questions over hits that are already retrieved. Thread-safe.

    The prefix's own block is computed once and kept here: it is the same for all questions.
    """

    def __init__(
        self,
        lm: LanguageModel,
        encoder: ModelEncoder,
        prompt_format: PromptFormat,
        kv: KVStore,
        documents: DocumentStore,
    ) -> None:
        self.lm = lm
        self.encoder = encoder
        self.format = prompt_format
        self.kv = kv
        self.documents = documents
        self._eos = eos_token_ids(lm)
        self._prefix_block: KVBlock | None = None
        self._lock = threading.Lock()

    def prompt(self, question: str, hits: Sequence[Hit], on_overflow: str) -> tuple[Prompt, int]:
        """The prompt over as many hits as fit, and how many were left out.

        Raises PromptError (empty question), ContextTooLongError (too long under "error", or without any passage).
        """
        if on_overflow not in OVERFLOWS:
            raise ConfigError(f"on_overflow {on_overflow!r} is unknown; choose one of {', '.join(OVERFLOWS)}")
        suffix = self.format.suffix_ids(self.lm.tokenizer, question)
        room = self.lm.max_positions - len(self.format.prefix_ids) - len(suffix)
        if room < 0:
            raise ContextTooLongError(
                f"the question has {len(suffix)} tokens and {self.lm.name} takes {self.lm.max_positions} with its "
                f"prompt; ask a shorter one"
            )
        kept = _fitting([len(hit.chunk.token_ids) for hit in hits], room)
        if kept < len(hits) and on_overflow == "error":
            total = self.lm.max_positions - room + sum(len(hit.chunk.token_ids) for hit in hits)
            raise ContextTooLongError(
                f"{len(hits)} passages make a prompt of {total} tokens and {self.lm.name} takes "
                f'{self.lm.max_positions}; ask for fewer (k={kept}) or pass on_overflow="trim"'
            )
        chunks = [hit.chunk.token_ids for hit in hits[:kept]]
        return Prompt(self.format.prefix_ids, chunks, suffix), len(hits) - kept

    def stream(
        self,
        question: str,
        hits: Sequence[Hit],
        method: FusionMethod,
        sampling: Sampling,
        on_overflow: str,
        clock: Clock,
        cancelled: threading.Event | None,
    ) -> Iterator[Event]:
        prompt, dropped = self.prompt(question, hits, on_overflow)
        hits = hits[: len(hits) - dropped]
        loaded = self._load(hits, method)
        sources = _sources(hits, loaded)
        yield Sources(sources)
        fused = self._fuse(prompt, method, loaded, sampling)
        clock.read(loaded, fused)
        text, tokens, finish = "", 0, "length"
        pieces = TextStream(self.lm.tokenizer, sampling.stop)
        steps = decode(
            self.lm,
            fused.cache,
            fused.next_logits,
            prompt.num_tokens,
            sampling,
            eos_ids=self._eos,
            cancelled=cancelled,
        )
        try:
            for token in steps:
                clock.first_token()
                tokens += 1
                if piece := pieces.push(token):
                    text += piece
                    yield Token(piece)
                if pieces.stopped:
                    break
            finish = "stop" if pieces.stopped or not _ran_out(tokens, sampling, self.lm, prompt) else "length"
            if piece := pieces.finish():
                text += piece
                yield Token(piece)
        finally:
            fused.cache.release()
        usage = Usage(prompt.num_tokens, max(0, fused.cached_tokens - loaded.encoded_tokens), tokens)
        yield Done(Answer(text, sources, clock.timings(), usage, method.name, dropped, finish))

    def _load(self, hits: Sequence[Hit], method: FusionMethod) -> LoadedBlocks:
        if not method.reuses_blocks:
            handles = [self.encoder.key(hit.chunk.token_ids) for hit in hits]
            return LoadedBlocks([], handles, [UNUSED] * len(hits), 0.0, 0.0, 0)
        return load_or_compute(self.encoder, self.kv, self.documents, [hit.chunk for hit in hits])

    def _fuse(self, prompt: Prompt, method: FusionMethod, loaded: LoadedBlocks, sampling: Sampling) -> Fused:
        if not method.reuses_blocks:
            return fuse(self.lm, prompt, method, reserve_tokens=sampling.max_tokens)
        return fuse(
            self.lm,
            prompt,
            method,
            loaded.blocks,
            recipe=self.encoder.recipe,
            prefix_block=self._prefix(),
            reserve_tokens=sampling.max_tokens,
        )

    def _prefix(self) -> KVBlock | None:
        if not self.format.prefix_ids:
            return None
        with self._lock:
            if self._prefix_block is None:
                self._prefix_block = self.lm.encode([self.format.prefix_ids])[0]
            return self._prefix_block


@dataclass
class Clock:
    """Collects the phases of one question."""

    started: float
    retrieve_s: float = 0.0
    _ttft_s: float | None = None
    _phases: dict[str, float] = field(default_factory=dict)

    def read(self, loaded: LoadedBlocks, fused: Fused) -> None:
        times = fused.timings
        self._phases = {
            "load_s": loaded.load_s,
            "encode_s": loaded.encode_s + times.encode_s,
            "place_s": times.place_s,
            "prefill_s": times.prefill_s,
        }

    def first_token(self) -> None:
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self.started

    def timings(self) -> Timings:
        total_s = time.perf_counter() - self.started
        ttft_s = total_s if self._ttft_s is None else self._ttft_s
        return Timings(retrieve_s=self.retrieve_s, ttft_s=ttft_s, total_s=total_s, **self._phases)


def _sources(hits: Sequence[Hit], loaded: LoadedBlocks) -> list[Source]:
    rows = zip(hits, loaded.handles, loaded.origins, strict=True)
    return [Source(hit.chunk, hit.score, handle, origin) for hit, handle, origin in rows]


def _fitting(lengths: Sequence[int], room: int) -> int:
    """How many of the best passages fit, whole."""
    for count, length in enumerate(lengths):
        room -= length
        if room < 0:
            return count
    return len(lengths)


def _ran_out(tokens: int, sampling: Sampling, lm: LanguageModel, prompt: Prompt) -> bool:
    return tokens >= min(sampling.max_tokens, lm.max_positions - prompt.num_tokens)
