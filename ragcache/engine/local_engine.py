"""One question, from its prompt to the last token of its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ragcache import plugins
from ragcache.engine.admission import MemoryNeed, SharedPrefixes, SharedPrefixRef, Size, kv_bytes, tokens_within
from ragcache.engine.answer import Done, Event, Source, Sources, Usage
from ragcache.engine.estimate import PrefillEstimate
from ragcache.engine.loader import COMPUTED, BlockLoader, LoadedBlocks
from ragcache.engine.output import OutputProcessor, write
from ragcache.engine.prefixes import Path, Prefixes, PrefixKV, WholeStore
from ragcache.engine.prompts import ANSWER_TOKENS, Prompts
from ragcache.engine.request import Clock, Kept, Request, RequestOptions
from ragcache.engine.verdict import NOTHING_TO_REUSE
from ragcache.fusion.fuse import FuseOutput, fuse
from ragcache.fusion.method import FusionMethod, Scope
from ragcache.fusion.place_check import place_kernel
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.buffers import SharedContext
from ragcache.kv.prefix_cache import PrefixStats
from ragcache.models.card import ModelCard, eos_token_ids
from ragcache.models.deadline import limited
from ragcache.models.generate import decode
from ragcache.models.graphs import use_graphs
from ragcache.models.language_model import LanguageModel
from ragcache.models.machine import translate_device_errors
from ragcache.models.scheduler import PassStats
from ragcache.models.thoughts import ThoughtLimit
from ragcache.plugins import Registry
from ragcache.prompt import Prompt, PromptEnds
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import Chunk

WARM_TOKENS = 16
UNUSED = "unused"
EXACT = "exact"
SHARED = "shared"


@dataclass(eq=False, repr=False)
class LocalEngine:
    """Answers prompts over hits that are already retrieved, with the model in this process. Thread-safe.

    graph_bytes: see `use_graphs`. Graphs are made for the first question, or `warm_up`: adding documents needs none
    """

    lm: LanguageModel
    prompts: Prompts
    lookup: KVLookup
    prefixes: Prefixes
    contexts: SharedPrefixes
    estimate: PrefillEstimate
    graph_bytes: int | None

    def __post_init__(self) -> None:
        self._eos = eos_token_ids(self.lm)
        self._scope = Scope()

    def check(self, reading: RequestOptions) -> None:
        self.prompts.check(reading.method)
        reading.sampling.check_ids(self.lm.vocab_size, self.lm.name)

    def stream(
        self, ends: PromptEnds, hits: Sequence[Hit], reading: RequestOptions, clock: Clock, kept: Kept | None = None
    ) -> Generator[Event, None, None]:
        """Wait until there is memory for prompt and answer, then read and answer.

        Raises AnswerTooLargeError, CancelledError, TimedOutError, and what `Prompts.prompt` raises.
        """
        use_graphs(self.lm, self.graph_bytes)
        asked = self._request(ends, hits, reading, clock, kept)
        prompt, reading, limit = asked.prompt, asked.reading, asked.limit
        method, need = reading.method, self._need(prompt, reading)
        # The prefix tree keeps what runs as text, passages included; a placed context of blocks stays where it is.
        keep = method.reuses_blocks and bool(prompt.chunk_ids)
        key = asked.context_key if self.lookup.shares_context_of(method) else None
        waiting = time.perf_counter()
        with translate_device_errors(), self.contexts.admit(key, need, limit, keep=keep) as seat:
            clock.queue_s = time.perf_counter() - waiting
            with ExitStack() as leases:
                with limited(limit):
                    ready = leases.enter_context(self.lookup.resolve(asked, seat.placed))
                yield Sources(ready.sources, reading.choice.label, reading.choice.why)
                limit.check()
                # Over the context of another question where there is one; else others may find this one's.
                with limited(limit), seat.placing(limit) as tell:
                    started = time.perf_counter()
                    fused = fuse(
                        self.lm,
                        ready.path.parts if ready.path is not None and ready.path.layout.separate else prompt,
                        method,
                        ready.loaded.blocks,
                        recipe=self.lookup.encoder.recipe if method.reuses_blocks else None,
                        reserve_tokens=self.prompts.room_at_first(prompt.num_tokens, reading),
                        evict=reading.evict,
                        exact=ready.prefix.exact if seat.placed is None else None,
                        base=seat.placed,
                        scope=self._scope_of(asked),
                    )
                    if tell is not None:
                        tell(fused.share())
                if not method.reuses_blocks and min(fused.computed_tokens) == fused.prompt_tokens:
                    self.lm.finish()  # nothing of the prompt was known: the estimate of a full prefill learns from it
                    self.estimate.add(fused.prompt_tokens, time.perf_counter() - started)
            times, loaded, written = fused.timings, ready.loaded, OutputProcessor()
            encode_s = ready.prefix.encode_s + loaded.encode_s + times.encode_s
            clock.read(times.prefill_s, ready.prefix.load_s + loaded.load_s, encode_s, times.place_s)
            try:
                most = self._most(fused.prompt_tokens, reading)
                most = min(most, self.prompts.room(fused.next_position, reading))
                yield from write(self.lm, asked, self._decode(asked, fused, written, seat, most), most, written)
            finally:
                self.lookup.keep(asked, ready, written.ids if written.has_run_all else written.ids[:-1], fused)
                fused.cache.release()
            if kept is not None:
                kept.answered(asked.hits, written.turn, written.said(self.lm))
            yield Done(written.answer(asked, ready.sources, ready.usage(fused, written)))

    def _request(
        self, ends: PromptEnds, hits: Sequence[Hit], reading: RequestOptions, clock: Clock, kept: Kept | None
    ) -> Request:
        """The question with its prompt, and by full prefill where nothing of that can be reused."""
        limit = reading.limit(clock.started)
        if kept is None:  # a conversation's order is what it was, and its later prompts would lack the hint
            reading = self.prompts.settled(ends, hits, reading)
            ends, hits = self.prompts.ordered(ends, hits, reading)
        prompt, dropped = self.prompts.prompt(ends, hits, reading)
        if kept is None and not prompt.chunk_ids and reading.method.reuses_blocks:
            # On from what earlier prompts have in common with it: no method places, weighs or evicts anything.
            reading = replace(reading.exactly(NOTHING_TO_REUSE), evict=None)
        return Request(prompt, hits[: len(hits) - dropped], dropped, reading, clock, limit, kept)

    def _scope_of(self, asked: Request) -> Scope:
        """What other questions may learn from this one: nothing where somebody's own text stands in its prompt, or a
        passage was deleted meanwhile."""
        scope = self._scope  # before the look at what is stored: with any later change a new scope begins
        return scope if asked.reading.method.remembers and self.lookup.is_of_store(asked) else Scope()

    def drop_deleted(self) -> None:
        """Let go of what was computed over passages that are gone."""
        self.prefixes.drop_deleted()
        self._forget()

    def clear(self) -> None:
        """Let go of all exact KV."""
        self.prefixes.clear()
        self._forget()

    def _forget(self) -> None:
        """Let go of contexts, and of what methods keep of earlier prompts: it goes with its scope."""
        self.contexts.forget()
        self._scope = Scope()

    def warm_up(self) -> None:
        """Pay for what the first question would pay for: a model's first pass takes longer."""
        use_graphs(self.lm, self.graph_bytes)
        place_kernel(self.lm, ())  # compiled and compared
        cache = self.lm.new_cache(WARM_TOKENS)
        self.lm.run([rank % self.lm.vocab_size for rank in range(WARM_TOKENS)], 0, cache)
        cache.release()

    def prefix_stats(self) -> PrefixStats:
        return self.prefixes.stats()

    def pass_stats(self) -> PassStats:
        return self.lm.scheduler.stats()

    def _need(self, prompt: Prompt, reading: RequestOptions) -> MemoryNeed:
        """Memory for the prompt, what the method adds, and the answer as far as it is limited; and for what stands
        behind the passages alone."""
        read = reading.method.layout(self.lm, prompt.parts, self.lookup.encoder.recipe).num_tokens
        room, most = self.prompts.room_at_first(read, reading), self._most(read, reading)
        whole, own = (
            Size(
                before + room,
                kv_bytes(self.lm, before + room),
                kv_bytes(self.lm, before + most) if most > room else 0,
            )
            for before in (read, len(prompt.suffix_ids))
        )
        return MemoryNeed(whole, own)

    def _most(self, read: int, reading: RequestOptions) -> int:
        """Tokens of the longest answer. Where nobody limits it, it may grow into half of the memory of all answers, if
        the context is not full before: the other half is for what others begin with."""
        room, first = self.prompts.room(read, reading), self.prompts.room_at_first(read, reading)
        budget = self.contexts.admission.budget_bytes
        free = min(budget // 2, budget - kv_bytes(self.lm, read + first))
        return max(first, min(room, tokens_within(self.lm, free) - read))

    def _decode(
        self, asked: Request, fused: FuseOutput, written: OutputProcessor, seat: SharedPrefixRef, most: int
    ) -> Generator[int, None, None]:
        cache, read, reading = fused.cache, fused.cache.own_tokens, asked.reading
        thoughts = None
        if reading.thinking is not None:
            is_open = asked.has_begun_thoughts(self.lm.tokenizer)
            thoughts = partial(ThoughtLimit, reading.thinking, self.lm.tokenizer, reading.thinking_budget, is_open)

        def more() -> int:
            """Room for half as much again as there is, within `most`."""
            used = cache.own_tokens
            wanted = min(max(ANSWER_TOKENS, used // 2), read + most - used)
            seat.grow(kv_bytes(self.lm, used + wanted), asked.limit)
            cache.make_room(wanted)
            return wanted

        return decode(
            self.lm,
            fused.cache,
            fused.next_logits,
            fused.next_position,
            reading.sampling,
            eos_ids=self._eos,
            never=fused.reserved_ids,
            prompt_ids=fused.layout.ids,
            scores=written.scores,
            limit=asked.limit,
            more=more,
            most=most,
            thoughts=thoughts,
            room=self.prompts.room_at_first(fused.next_position, reading),
        )


# The KV that is at hand for a prompt, and what has to be loaded or computed before it is read.


@dataclass(frozen=True)
class ResolvedKV:
    """What a prompt is read from.

    path:    the prompt as the prefix tree knows it; None where it is of no use to the method
    prefix:  exact KV of its first tokens
    loaded:  its passages' blocks
    sources: its passages, with where their KV came from
    """

    path: Path | None
    prefix: PrefixKV
    loaded: LoadedBlocks
    sources: list[Source]

    def usage(self, fused: FuseOutput, written: OutputProcessor) -> Usage:
        counts = fused.counts(self.prefix.created_tokens + self.loaded.encoded_tokens)
        return Usage(
            fused.prompt_tokens,
            counts.cached,
            len(written.ids),
            counts.created,
            counts.computed,
            written.reasoning_tokens,
        )


@dataclass(eq=False, repr=False)
class KVLookup:
    """Brings what prompts are read from. Thread-safe."""

    lm: LanguageModel
    encoder: ModelEncoder
    _documents: DocumentStore
    _prefixes: Prefixes
    _whole: WholeStore
    _loader: BlockLoader

    @contextmanager
    def resolve(self, asked: Request, base: SharedContext | None) -> Iterator[ResolvedKV]:
        """Everything that the prompt is read from, which stays until the block ends.

        base: all that stands before its suffix, as another question placed it

        Raises CancelledError and TimedOutError within `limits.limited`.
        """
        path, loaded, encoder = self._path(asked), LoadedBlocks(), self.encoder
        with self._prefix(asked, path, base) as prefix:
            known, chunks = 0 if prefix.exact is None else prefix.exact.num_tokens, list[Chunk]()
            if path is not None and base is None:
                placed = path.layout.placed(known)
                chunks = [path.hits[piece.passage].chunk for piece in placed if piece.passage is not None]
            elif asked.reading.method.reuses_blocks and base is None:
                chunks = [hit.chunk for hit in asked.hits]
                encoder = self._encoder_behind(asked.reading.method.prefix_ids(self.lm, asked.prompt), prefix)
            if chunks:
                passing, ahead = encoder is not self.encoder, asked.reading.ahead
                loaded = self._loader.load(encoder, self._documents, chunks, passing=passing, ahead=ahead)
            if path is not None and base is None:
                sources = self._along(asked, path, loaded, known, COMPUTED if prefix.created_tokens else EXACT)
            else:
                origins = loaded.origins or [UNUSED if base is None else SHARED] * len(asked.hits)
                keys = loaded.handles or encoder.keys([hit.chunk for hit in asked.hits])
                rows = zip(asked.hits, keys, origins, strict=True)
                sources = [Source(hit.chunk, hit.score, handle, origin) for hit, handle, origin in rows]
            yield ResolvedKV(path, prefix, loaded, sources)

    def keep(self, asked: Request, ready: ResolvedKV, answer_ids: Sequence[int], fused: FuseOutput) -> None:
        """Remember the KV of the prompt and its answer, where the prefix tree can hold it."""
        path, reading = ready.path, asked.reading
        method = reading.method
        if path is None or reading.evict is not None or not self.keeps_context_of(method):
            return
        if method.reuses_blocks or method.takes_exact:
            self._prefixes.keep(method, path, answer_ids, fused)

    def keeps_context_of(self, method: FusionMethod) -> bool:
        """Whether what the method places can be shared and kept: where blocks hold other tokens in each head, every
        question places its own."""
        return self.encoder.recipe.is_dense or not method.reuses_blocks

    def shares_context_of(self, method: FusionMethod) -> bool:
        """Whether questions over the same passages can stand on one context: a state is kept where blocks end alone."""
        return self.keeps_context_of(method) and (method.reuses_blocks or not self.lm.is_recurrent)

    def is_of_store(self, asked: Request) -> bool:
        """Whether nothing stands before the question but the store's own prefix and passages that are still stored."""
        own = tuple(asked.reading.method.prefix_ids(self.lm, asked.prompt)) == self.encoder.first_ids
        ids = {hit.chunk.vector_id for hit in asked.hits}
        return (
            own
            and asked.kept is None
            and not asked.reading.found
            and len(self._documents.chunks_by_vector_ids(ids)) == len(ids)
        )

    def _path(self, asked: Request) -> Path | None:
        method, kept = asked.reading.method, asked.kept
        goes_on = asked.reading.found and asked.reading.evict is None if method.reuses_blocks else method.takes_exact
        if kept is None and not goes_on:
            return None
        parts = asked.prompt.parts
        if kept is not None:
            parts = (*kept.earlier.prompt_parts(), *parts[1:])
        layout = method.layout(self.lm, parts, self.encoder.recipe)
        hits = [*(kept.earlier.hits if kept else ()), *asked.hits]
        return Path(parts, layout, hits, len(asked.hits), self._prefixes.drops)

    def _prefix(
        self, asked: Request, path: Path | None, base: SharedContext | None
    ) -> AbstractContextManager[PrefixKV]:
        """The KV of the prompt's first tokens: of its prefix for a method that reads blocks; else of what is known."""
        method = asked.reading.method
        if base is not None or not (method.reuses_blocks or method.takes_exact):
            return nullcontext(PrefixKV())
        if path is None:
            return self._prefixes.text(method.prefix_ids(self.lm, asked.prompt))
        return self._known(asked, path)

    @contextmanager
    def _known(self, asked: Request, path: Path) -> Iterator[PrefixKV]:
        """What the tree has, all but the last token at most, and nothing of the suffix where its rows vote on what is
        evicted; of a store that is read whole, everything before the question."""
        prompt, reading = asked.prompt, asked.reading
        most = path.layout.num_tokens - 1 if reading.evict is None else prompt.context_tokens
        with self._prefixes.match(reading.method, path, most) as (lease, load_s):
            count = 0 if lease is None else lease.num_tokens
            if reading.found and count <= len(prompt.prefix_ids):
                with self._prefixes.text(prompt.prefix_ids) as prefix:
                    yield prefix
            elif reading.whole is None or count >= prompt.context_tokens:
                yield PrefixKV(lease, load_s=load_s)
            else:
                prefix = self._whole.read(prompt.ids[: prompt.context_tokens], reading.whole)
                yield prefix._replace(load_s=prefix.load_s + load_s)

    def _encoder_behind(self, ids: list[int], prefix: PrefixKV) -> ModelEncoder:
        """The store's own, or one that encodes behind another prefix where blocks depend on that."""
        own = self.encoder
        if not own.recipe.needs_prefix or ids == own.prefix_ids:
            return own
        return ModelEncoder(
            self.lm,
            own.recipe,
            ids,
            own.tenant,
            read_prefix=lambda _: nullcontext(prefix.exact),
            on_encoded=own.on_encoded,
            neighbourhood=own.neighbourhood,
        )

    def _along(self, asked: Request, path: Path, loaded: LoadedBlocks, known: int, known_as: str) -> list[Source]:
        """This turn's passages, and those of them that were read before, with where their KV came from."""
        fresh = iter(zip(loaded.handles, loaded.origins, strict=True))
        keys = self.encoder.keys([hit.chunk for _, hit in path.passages])
        sources = []
        for (piece, hit), key in zip(path.passages, keys, strict=True):
            if path.layout.separate and piece.end > known:
                handle, origin = next(fresh)
            else:
                handle, origin = key, known_as if piece.end <= known else UNUSED
            sources.append(Source(hit.chunk, hit.score, handle, origin))
        by_ids = {tuple(source.chunk.token_ids): source for source in sources}
        again = asked.kept.earlier.again if asked.kept else ()
        return [
            *sources[len(sources) - path.asked :],
            *(replace(by_ids[tuple(hit.chunk.token_ids)], chunk=hit.chunk, score=hit.score) for hit in again),
        ]


# The contract of what computes answers.


class Engine(Protocol):
    """Answers prompts over hits that are already retrieved. Thread-safe.

    `LocalEngine` runs the model in this process; those of `ENGINES` have another engine run it.
    """

    @property
    def prompts(self) -> Prompts: ...

    def check(self, reading: RequestOptions) -> None:
        """Raises ConfigError for a question that cannot be read this way."""

    def stream(
        self, ends: PromptEnds, hits: Sequence[Hit], reading: RequestOptions, clock: Clock, kept: Kept | None = None
    ) -> Generator[Event, None, None]:
        """Sources, then tokens, then the whole answer."""

    def drop_deleted(self) -> None:
        """Let go of what was computed over passages that are gone."""

    def clear(self) -> None:
        """Let go of everything that is kept between questions."""

    def warm_up(self) -> None:
        """Pay for what the first question would pay for."""

    def prefix_stats(self) -> PrefixStats: ...

    def pass_stats(self) -> PassStats:
        """Counts of the model's passes in this process."""


class Connection(Protocol):
    """Another engine, reached at an address. Nothing is sent before it is asked."""

    url: str

    def longest_prompt(self) -> int | None:
        """Tokens of prompt and answer that it takes; None where it does not say. Raises EngineError,
        ModelMismatchError."""

    def reads(self, card: ModelCard, method: FusionMethod) -> bool:
        """Whether it can read stored blocks by this method."""

    def engine(self, card: ModelCard, prompts: Prompts, kv: KVStore) -> Engine:
        """What answers by it, over a store's blocks."""

    def close(self) -> None: ...


ENGINES: Registry[Callable[[str, str, str | None], Connection]] = Registry(plugins.ENGINES)
"""Other engines by the scheme of their addresses; each takes an address, the model's fingerprint and a key, and raises
ConfigError for an address that is none of its own."""
