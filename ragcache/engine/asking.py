"""One question, from its text to the last token of its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ragcache.engine.answer import Answer, Done, Event, Source, Sources, Timings, Token, Usage
from ragcache.engine.blocks import LoadedBlocks, load_or_compute
from ragcache.errors import ConfigError, ContextTooLongError
from ragcache.fusion.additions import Additions
from ragcache.fusion.base import FusionMethod
from ragcache.fusion.eviction import SnapKV
from ragcache.fusion.fuse import Fused, block_recipe, fuse
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

    The prefix's own block is computed once and kept here: it is the same for all questions (a method may put tokens of
    its own behind the prefix, which makes another block).
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
        self._prefix_blocks: dict[tuple[int, ...], KVBlock] = {}
        self._lock = threading.Lock()

    def check(self, method: FusionMethod) -> None:
        """Raises ConfigError when the method cannot read the blocks that this store's encoder makes."""
        if not method.reuses_blocks:
            return
        own = self.encoder
        recipe = block_recipe(self.lm, method, own.recipe)
        prefix_ids = [*self.format.prefix_ids, *method.additions(self.lm).behind_prefix] if recipe.sees_prefix else []
        if recipe != own.recipe or prefix_ids != own.prefix_ids:
            other = f"{own.recipe}" if recipe != own.recipe else "blocks behind another prefix"
            raise ConfigError(
                f"method {method.name!r} needs blocks of recipe {recipe} and the store was opened for {other}; open it "
                f"with method={method.name!r}"
            )

    def prompt(self, question: str, hits: Sequence[Hit], method: FusionMethod, on_overflow: str) -> tuple[Prompt, int]:
        """The prompt over as many hits as fit, and how many were left out.

        Raises PromptError (empty question, more passages than the method can read under "error"), ContextTooLongError
        (too long under "error", or without any passage).
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
        whole = Prompt(self.format.prefix_ids, [hit.chunk.token_ids for hit in hits], suffix)
        if hits and on_overflow == "error":
            method.check(self.lm, whole)
        added = method.additions(self.lm)
        kept = _fitting([len(chunk) for chunk in whole.chunk_ids], room, added)
        if kept < len(hits) and on_overflow == "error":
            total = whole.num_tokens + len(added.ids(len(hits)))
            raise ContextTooLongError(
                f"{len(hits)} passages make a prompt of {total} tokens and {self.lm.name} takes "
                f'{self.lm.max_positions}; ask for fewer (k={kept}) or pass on_overflow="trim"'
            )
        return replace(whole, chunk_ids=whole.chunk_ids[:kept]), len(hits) - kept

    def stream(
        self,
        question: str,
        hits: Sequence[Hit],
        method: FusionMethod,
        evict: SnapKV | None,
        sampling: Sampling,
        on_overflow: str,
        clock: Clock,
        cancelled: threading.Event | None,
    ) -> Iterator[Event]:
        prompt, dropped = self.prompt(question, hits, method, on_overflow)
        hits = hits[: len(hits) - dropped]
        loaded = self._load(hits, method)
        sources = _sources(hits, loaded)
        yield Sources(sources)
        fused = self._fuse(prompt, method, evict, loaded, sampling)
        clock.read(loaded, fused)
        text, tokens, finish = "", 0, "length"
        pieces = TextStream(self.lm.tokenizer, sampling.stop)
        steps = decode(
            self.lm,
            fused.cache,
            fused.next_logits,
            fused.next_position,
            sampling,
            eos_ids=self._eos,
            never=fused.reserved_ids,
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
            finish = "stop" if pieces.stopped or not _ran_out(tokens, sampling, self.lm, fused) else "length"
            if piece := pieces.finish():
                text += piece
                yield Token(piece)
        finally:
            fused.cache.release()
        usage = Usage(fused.prompt_tokens, max(0, fused.cached_tokens - loaded.encoded_tokens), tokens)
        yield Done(Answer(text, sources, clock.timings(), usage, method.name, dropped, finish))

    def _load(self, hits: Sequence[Hit], method: FusionMethod) -> LoadedBlocks:
        if not method.reuses_blocks:
            handles = [self.encoder.key(hit.chunk.token_ids) for hit in hits]
            return LoadedBlocks([], handles, [UNUSED] * len(hits), 0.0, 0.0, 0)
        return load_or_compute(self.encoder, self.kv, self.documents, [hit.chunk for hit in hits])

    def _fuse(
        self,
        prompt: Prompt,
        method: FusionMethod,
        evict: SnapKV | None,
        loaded: LoadedBlocks,
        sampling: Sampling,
    ) -> Fused:
        if not method.reuses_blocks:
            return fuse(self.lm, prompt, method, reserve_tokens=sampling.max_tokens, evict=evict)
        return fuse(
            self.lm,
            prompt,
            method,
            loaded.blocks,
            recipe=self.encoder.recipe,
            prefix_block=self._prefix(prompt, method),
            reserve_tokens=sampling.max_tokens,
            evict=evict,
        )

    def _prefix(self, prompt: Prompt, method: FusionMethod) -> KVBlock | None:
        behind = method.additions(self.lm).behind_prefix if prompt.chunk_ids else ()
        ids = (*prompt.prefix_ids, *behind)
        if not ids:
            return None
        with self._lock:
            if ids not in self._prefix_blocks:
                self._prefix_blocks[ids] = self.lm.encode([ids])[0]
            return self._prefix_blocks[ids]


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


def _fitting(lengths: Sequence[int], room: int, added: Additions) -> int:
    """How many of the best passages fit, whole, with what the method adds to them."""
    count = len(lengths) if added.max_chunks is None else min(len(lengths), added.max_chunks)
    while count and sum(lengths[:count]) + len(added.ids(count)) > room:
        count -= 1
    return count


def _ran_out(tokens: int, sampling: Sampling, lm: LanguageModel, fused: Fused) -> bool:
    return tokens >= min(sampling.max_tokens, lm.max_positions - fused.next_position)
