"""Answers from a store's states, by a model that llama.cpp runs in this process."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ragcache.engine.answer import Done, Event, Sources
from ragcache.engine.caches.prefix_cache import PrefixStats
from ragcache.engine.contract import EmbeddedModel, reads_by_layout
from ragcache.engine.estimate import PrefillEstimate
from ragcache.engine.kv_lookup import SHARED, UNUSED
from ragcache.engine.loader import BlockLoader
from ragcache.engine.output import OutputProcessor, sources_of, write
from ragcache.engine.prompts import ANSWER_TOKENS, Prompts
from ragcache.engine.request import Request, RequestOptions
from ragcache.errors import ConfigError
from ragcache.fusion.fuse import FuseOutput, PromptPlan, TokenCounts
from ragcache.fusion.layout import Layout
from ragcache.fusion.method import FusionMethod, PhaseTimes
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.kv.fused_cache import FusedCache
from ragcache.kv.opaque_block import OpaqueBlock
from ragcache.models.card import ModelCard, eos_token_ids
from ragcache.models.deadline import NO_LIMIT, limited
from ragcache.models.generate import decode
from ragcache.models.scheduler import PassStats
from ragcache.store.documents import DocumentStore
from ragcache_llamacpp.model import LlamaModel, as_cache
from ragcache_llamacpp.options import NAME
from ragcache_llamacpp.reading import Reading, prefill
from ragcache_llamacpp.sequences import CellSequence, same

METHODS = "full, reposition or epic"
WARM_TOKENS = 16


@dataclass(eq=False)
class Passages:
    """The passages of a prompt, and the origin of their KV.

    handles, origins: by passage
    blocks: blocks loaded so far, by the position of the passage's first token
    """

    handles: list[str]
    origins: list[str]
    blocks: dict[int, OpaqueBlock] = field(default_factory=dict)
    load_s: float = 0.0
    encode_s: float = 0.0
    encoded_tokens: int = 0


class EmbeddedLlama(LlamaModel, EmbeddedModel):
    """A model that llama.cpp runs, over a store's blocks."""

    def reads(self, card: ModelCard, method: FusionMethod) -> bool:
        return reads_by_layout(card, method) and (self.moves_keys or not method.reuses_blocks)

    def engine(
        self,
        prompts: Prompts,
        encoder: ModelEncoder,
        documents: DocumentStore,
        loader: BlockLoader,
        estimate: PrefillEstimate,
    ) -> LlamaEngine:
        return LlamaEngine(self, prompts, encoder, documents, loader, estimate)

    def check_method(self, method: FusionMethod) -> None:
        """Raise ConfigError for a method that llama.cpp cannot read by."""
        if method.reuses_blocks and not self.moves_keys:
            raise ConfigError(
                f"method {method.name!r} moves keys, which {NAME} changes where it moves them for {self.name} (YaRN or "
                "LongRoPE); use full, or leave out the engine",
                "method",
            )
        if not reads_by_layout(self, method):
            raise ConfigError(
                f"method {method.name!r} chooses or weighs tokens while the model runs, and {NAME} runs it without; "
                f"use {METHODS}, or leave out the engine",
                "method",
            )

    def prefill(self, plan: PromptPlan, blocks: Sequence[KVBlock], reserve_tokens: int) -> FuseOutput:
        self.check_method(plan.method)
        reading, layout = Reading.of(plan), plan.layout
        placed = {piece.start: cast(OpaqueBlock, block) for piece, block in zip(layout.placed(), blocks, strict=True)}
        with ExitStack() as stack:
            most = min(layout.num_tokens + reserve_tokens, self.sequences.num_cells)
            (sequence,) = stack.enter_context(self.admit(reading.elements, same, [most], NO_LIMIT))
            started = time.perf_counter()
            logits, placed_s, computed = prefill(self, sequence, reading, placed)
            times = PhaseTimes(place_s=placed_s, prefill_s=time.perf_counter() - started - placed_s)
            sequence.release = stack.pop_all().close
        held = layout.num_tokens
        return FuseOutput(
            as_cache(sequence), logits, (computed,), (held,), held, plan.prompt, layout, times, 0, plan.added.reserved
        )

    def run_each(self, ids: Sequence[int], cache: FusedCache) -> Tensor:
        sequence = cast(CellSequence, cast(Any, cache))
        return torch.stack([self.run([id], sequence) for id in ids])


@dataclass(eq=False, repr=False)
class LlamaEngine:
    """Answers prompts over retrieved hits by llama.cpp. Thread-safe."""

    lm: EmbeddedLlama
    prompts: Prompts
    _encoder: ModelEncoder
    _documents: DocumentStore
    _loader: BlockLoader
    _estimate: PrefillEstimate

    def __post_init__(self) -> None:
        self._eos = eos_token_ids(self.lm)
        self.prompts._known = lambda _method, ids: self.lm.sequences.known(ids)

    def of(self, salt: str) -> LlamaEngine:
        """Return the engine for a view of all collections. Raises ConfigError for any other view.

        llama.cpp's sequences have no salt, so answers of such a view would reuse, and thereby reveal, other callers'
        prompts.
        """
        if salt:
            raise ConfigError(
                f"engine {NAME} keeps the prompts of all callers together, so it serves no collections, and no "
                "keys that see a part of the store; leave out the engine, or give each of them a store of its own"
            )
        return self

    def check(self, options: RequestOptions) -> None:
        self.prompts.check(options.method)
        options.sampling.check_ids(self.lm.vocab_size, self.lm.name)
        self.lm.check_method(options.method)
        if options.method.reuses_blocks and not self._encoder.recipe.is_dense:
            raise ConfigError(
                f"engine {NAME} keeps whole states, and the blocks of recipe {self._encoder.recipe} leave out tokens; "
                "make a store with all KV",
                "recipe",
            )

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Wait until the context has room for prompt and answer, then read the prompt and yield the answer's events.

        Raises AnswerTooLargeError, CancelledError, TimedOutError and EngineError.
        """
        options, clock, limit, layout = request.options, request.clock, request.limit, request.plan.layout
        reading = Reading.of(request.plan)
        usable = layout.usable if layout.separate else same
        with limited(limit):
            passages = self._passages(request, layout)
            self._load(request, reading, passages, self.lm.sequences.known(reading.elements, usable))
        room = self.prompts.room_at_first(layout.num_tokens, options)
        waiting, output = time.perf_counter(), OutputProcessor()
        admitted = self.lm.admit(reading.elements, usable, [layout.num_tokens + room], limit)
        with admitted as [sequence]:
            clock.queue_s = time.perf_counter() - waiting
            known = len(sequence.elements)
            with limited(limit):
                self._load(request, reading, passages, known)
            sources = sources_of(request, passages.handles, passages.origins)
            yield Sources(sources, options.choice.label, options.choice.why)
            limit.check()
            with limited(limit):
                started = time.perf_counter()
                logits, placed_s, computed = prefill(self.lm, sequence, reading, passages.blocks)
                read_s = time.perf_counter() - started
            if computed == layout.num_tokens:
                self._estimate.add(computed, read_s)
            clock.read(read_s - placed_s, passages.load_s, passages.encode_s, placed_s)
            most = min(self.prompts.room(layout.num_tokens, options), self.lm.sequences.num_cells - layout.num_tokens)
            yield from write(
                self.lm, request, self._decode(request, sequence, logits, output, room, most), most, output
            )
            sequence.keeps = True
        if request.earlier_turns is not None:
            request.earlier_turns.answered(request.hits, output.turn, output.said(self.lm))
        counts = TokenCounts.of(layout.num_tokens, [computed], passages.encoded_tokens)
        yield Done(output.answer(request, sources, output.usage(counts)))

    def clear(self) -> None:
        """Drop every kept sequence: any may hold a deleted passage."""
        self.lm.sequences.forget()

    def warm_up(self) -> None:
        """Run the model once now, because its first pass takes longer and would delay the first question."""
        ids = [rank % self.lm.vocab_size for rank in range(WARM_TOKENS)]
        with self.lm.admit(ids, same, [len(ids)], NO_LIMIT) as [sequence]:
            self.lm.run(ids[len(sequence.elements) :], sequence)

    def prefix_stats(self) -> PrefixStats:
        tokens = self.lm.sequences.kept_tokens
        return PrefixStats(tokens * self.lm.kv_bytes_per_token, tokens, 0, 0, 0, 0, 0)

    def pass_stats(self) -> PassStats:
        return self.lm.scheduler.stats()

    def _passages(self, request: Request, layout: Layout) -> Passages:
        """Return the prompt's passages, without their blocks."""
        handles = self._encoder.keys([hit.chunk for hit in request.all_hits])
        return Passages(handles, [SHARED if layout.separate else UNUSED] * len(handles))

    def _load(self, request: Request, reading: Reading, passages: Passages, known: int) -> None:
        """Load or compute the blocks of the passages after the first `known` tokens, unless they were loaded before."""
        hits = request.all_hits
        pieces = [piece for piece in reading.layout.placed(known) if piece.start not in passages.blocks]
        numbers = [piece.passage for piece in pieces if piece.passage is not None]
        if not numbers:
            return
        encoder = self._encoder.after(request.options.method.prefix_ids(self.lm, request.prompt))
        loaded = self._loader.load(
            encoder, self._documents, [hits[number].chunk for number in numbers], passing=encoder is not self._encoder
        )
        for number, handle, origin in zip(numbers, loaded.handles, loaded.origins, strict=True):
            passages.handles[number], passages.origins[number] = handle, origin
        for piece, block in zip(pieces, loaded.blocks, strict=True):
            passages.blocks[piece.start] = cast(OpaqueBlock, block)
        passages.load_s += loaded.load_s
        passages.encode_s += loaded.encode_s
        passages.encoded_tokens += loaded.encoded_tokens

    def _decode(
        self, request: Request, sequence: CellSequence, logits: Tensor, output: OutputProcessor, room: int, most: int
    ) -> Generator[int, None, None]:
        options, pool = request.options, self.lm.sequences
        read = len(sequence.elements)

        def more() -> int:
            """Reserve cells for half as many tokens as the sequence holds, within `most`; return how many."""
            used = len(sequence.elements)
            capacity = min(max(ANSWER_TOKENS, used // 2), read + most - used)
            pool.grow(sequence, capacity, request.limit)
            return capacity

        return decode(
            self.lm,
            as_cache(sequence),
            logits,
            read,
            options.sampling,
            eos_ids=self._eos,
            never=request.plan.added.reserved,
            prompt_ids=request.plan.layout.ids,
            scores=output.scores,
            limit=request.limit,
            more=more,
            most=most,
            thoughts=request.thoughts(self.lm.tokenizer),
            room=room,
        )
