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
from ragcache.engine.request import Request, RequestOptions
from ragcache.fusion.fuse import FuseOutput, prefill
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

    def check(self, options: RequestOptions) -> None:
        self.prompts.check(options.method)
        options.sampling.check_ids(self.lm.vocab_size, self.lm.name)

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Wait until there is memory for prompt and answer, then read and answer.

        Raises AnswerTooLargeError, CancelledError and TimedOutError.
        """
        use_graphs(self.lm, self.graph_bytes)
        prompt, options, clock, limit = request.prompt, request.options, request.clock, request.limit
        method, need = options.method, self._need(request)
        # The prefix tree keeps what runs as text, passages included; a placed context of blocks stays where it is.
        keep = method.reuses_blocks and bool(prompt.chunk_ids)
        key = request.context_key if self.lookup.shares_context_of(method) else None
        waiting = time.perf_counter()
        with translate_device_errors(), self.contexts.admit(key, need, limit, keep=keep) as shared:
            clock.queue_s = time.perf_counter() - waiting
            with ExitStack() as leases:
                with limited(limit):
                    resolved = leases.enter_context(self.lookup.resolve(request, shared.placed))
                yield Sources(resolved.sources, options.choice.label, options.choice.why)
                limit.check()
                # Over the context of another question where there is one; else others may find this one's.
                with limited(limit), shared.placing(limit) as publish:
                    started = time.perf_counter()
                    fused = prefill(
                        self.lm,
                        request.plan,
                        resolved.loaded.blocks,
                        reserve_tokens=self.prompts.room_at_first(prompt.num_tokens, options),
                        evict=options.evict,
                        exact=resolved.prefix.exact if shared.placed is None else None,
                        base=shared.placed,
                        scope=self._scope_of(request),
                    )
                    if publish is not None:
                        publish(fused.share())
                if not method.reuses_blocks and min(fused.computed_tokens) == fused.prompt_tokens:
                    self.lm.finish()  # nothing of the prompt was known: the estimate of a full prefill learns from it
                    self.estimate.add(fused.prompt_tokens, time.perf_counter() - started)
            times, loaded, output = fused.timings, resolved.loaded, OutputProcessor()
            encode_s = resolved.prefix.encode_s + loaded.encode_s + times.encode_s
            clock.read(times.prefill_s, resolved.prefix.load_s + loaded.load_s, encode_s, times.place_s)
            try:
                most = self._most(fused.prompt_tokens, options)
                most = min(most, self.prompts.room(fused.next_position, options))
                yield from write(self.lm, request, self._decode(request, fused, output, shared, most), most, output)
            finally:
                self.lookup.keep(request, resolved, output.ids if output.has_run_all else output.ids[:-1], fused)
                fused.cache.release()
            if request.kept is not None:
                request.kept.answered(request.hits, output.turn, output.said(self.lm))
            yield Done(output.answer(request, resolved.sources, resolved.usage(fused, output)))

    def _scope_of(self, request: Request) -> Scope:
        """What other questions may learn from this one: nothing where somebody's own text stands in its prompt, or a
        passage was deleted meanwhile."""
        scope = self._scope  # before the look at what is stored: with any later change a new scope begins
        return scope if request.options.method.remembers and self.lookup.is_of_store(request) else Scope()

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

    def _need(self, request: Request) -> MemoryNeed:
        """Memory for the prompt, what the method adds, and the answer as far as it is limited; and for what stands
        behind the passages alone."""
        read, options = request.plan.layout.num_tokens, request.options
        room, most = self.prompts.room_at_first(read, options), self._most(read, options)
        whole, own = (
            Size(
                before + room,
                kv_bytes(self.lm, before + room),
                kv_bytes(self.lm, before + most) if most > room else 0,
            )
            for before in (read, len(request.prompt.suffix_ids))
        )
        return MemoryNeed(whole, own)

    def _most(self, read: int, options: RequestOptions) -> int:
        """Tokens of the longest answer. Where nobody limits it, it may grow into half of the memory of all answers, if
        the context is not full before: the other half is for what others begin with."""
        room, first = self.prompts.room(read, options), self.prompts.room_at_first(read, options)
        budget = self.contexts.admission.budget_bytes
        free = min(budget // 2, budget - kv_bytes(self.lm, read + first))
        return max(first, min(room, tokens_within(self.lm, free) - read))

    def _decode(
        self, request: Request, fused: FuseOutput, output: OutputProcessor, shared: SharedPrefixRef, most: int
    ) -> Generator[int, None, None]:
        cache, read, options = fused.cache, fused.cache.own_tokens, request.options
        thoughts = None
        if options.thinking is not None:
            is_open = request.has_begun_thoughts(self.lm.tokenizer)
            thoughts = partial(ThoughtLimit, options.thinking, self.lm.tokenizer, options.thinking_budget, is_open)

        def more() -> int:
            """Room for half as much again as there is, within `most`."""
            used = cache.own_tokens
            wanted = min(max(ANSWER_TOKENS, used // 2), read + most - used)
            shared.grow(kv_bytes(self.lm, used + wanted), request.limit)
            cache.make_room(wanted)
            return wanted

        return decode(
            self.lm,
            fused.cache,
            fused.next_logits,
            fused.next_position,
            options.sampling,
            eos_ids=self._eos,
            never=fused.reserved_ids,
            prompt_ids=fused.layout.ids,
            scores=output.scores,
            limit=request.limit,
            more=more,
            most=most,
            thoughts=thoughts,
            room=self.prompts.room_at_first(fused.next_position, options),
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

    def usage(self, fused: FuseOutput, output: OutputProcessor) -> Usage:
        counts = fused.counts(self.prefix.created_tokens + self.loaded.encoded_tokens)
        return Usage(
            fused.prompt_tokens,
            counts.cached,
            len(output.ids),
            counts.created,
            counts.computed,
            output.reasoning_tokens,
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
    def resolve(self, request: Request, base: SharedContext | None) -> Iterator[ResolvedKV]:
        """Everything that the prompt is read from, which stays until the block ends.

        base: all that stands before its suffix, as another question placed it

        Raises CancelledError and TimedOutError within `limits.limited`.
        """
        path, loaded, encoder = self._path(request), LoadedBlocks(), self.encoder
        with self._prefix(request, path, base) as prefix:
            known, chunks = 0 if prefix.exact is None else prefix.exact.num_tokens, list[Chunk]()
            if path is not None and base is None:
                placed = path.layout.placed(known)
                chunks = [path.hits[piece.passage].chunk for piece in placed if piece.passage is not None]
            elif request.options.method.reuses_blocks and base is None:
                chunks = [hit.chunk for hit in request.hits]
                encoder = self._encoder_behind(request.options.method.prefix_ids(self.lm, request.prompt), prefix)
            if chunks:
                passing, ahead = encoder is not self.encoder, request.options.ahead
                loaded = self._loader.load(encoder, self._documents, chunks, passing=passing, ahead=ahead)
            if path is not None and base is None:
                sources = self._along(request, path, loaded, known, COMPUTED if prefix.created_tokens else EXACT)
            else:
                origins = loaded.origins or [UNUSED if base is None else SHARED] * len(request.hits)
                keys = loaded.handles or encoder.keys([hit.chunk for hit in request.hits])
                rows = zip(request.hits, keys, origins, strict=True)
                sources = [Source(hit.chunk, hit.score, handle, origin) for hit, handle, origin in rows]
            yield ResolvedKV(path, prefix, loaded, sources)

    def keep(self, request: Request, resolved: ResolvedKV, answer_ids: Sequence[int], fused: FuseOutput) -> None:
        """Remember the KV of the prompt and its answer, where the prefix tree can hold it."""
        path, options = resolved.path, request.options
        method = options.method
        if path is None or options.evict is not None or not self.keeps_context_of(method):
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

    def is_of_store(self, request: Request) -> bool:
        """Whether nothing stands before the question but the store's own prefix and passages that are still stored."""
        own = tuple(request.options.method.prefix_ids(self.lm, request.prompt)) == self.encoder.first_ids
        ids = {hit.chunk.vector_id for hit in request.hits}
        return (
            own
            and request.kept is None
            and not request.options.found
            and len(self._documents.chunks_by_vector_ids(ids)) == len(ids)
        )

    def _path(self, request: Request) -> Path | None:
        method, kept = request.options.method, request.kept
        goes_on = (
            request.options.found and request.options.evict is None if method.reuses_blocks else method.takes_exact
        )
        if kept is None and not goes_on:
            return None
        hits = [*(kept.earlier.hits if kept else ()), *request.hits]
        return Path(request.plan.parts, request.plan.layout, hits, len(request.hits), self._prefixes.drops)

    def _prefix(
        self, request: Request, path: Path | None, base: SharedContext | None
    ) -> AbstractContextManager[PrefixKV]:
        """The KV of the prompt's first tokens: of its prefix for a method that reads blocks; else of what is known."""
        method = request.options.method
        if base is not None or not (method.reuses_blocks or method.takes_exact):
            return nullcontext(PrefixKV())
        if path is None:
            return self._prefixes.text(method.prefix_ids(self.lm, request.prompt))
        return self._known(request, path)

    @contextmanager
    def _known(self, request: Request, path: Path) -> Iterator[PrefixKV]:
        """What the tree has, all but the last token at most, and nothing of the suffix where its rows vote on what is
        evicted; of a store that is read whole, everything before the question."""
        prompt, options = request.prompt, request.options
        most = path.layout.num_tokens - 1 if options.evict is None else prompt.context_tokens
        with self._prefixes.match(options.method, path, most) as (lease, load_s):
            count = 0 if lease is None else lease.num_tokens
            if options.found and count <= len(prompt.prefix_ids):
                with self._prefixes.text(prompt.prefix_ids) as prefix:
                    yield prefix
            elif options.whole is None or count >= prompt.context_tokens:
                yield PrefixKV(lease, load_s=load_s)
            else:
                prefix = self._whole.read(prompt.ids[: prompt.context_tokens], options.whole)
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

    def _along(self, request: Request, path: Path, loaded: LoadedBlocks, known: int, known_as: str) -> list[Source]:
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
        again = request.kept.earlier.again if request.kept else ()
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

    def check(self, options: RequestOptions) -> None:
        """Raises ConfigError for a question that cannot be read this way."""

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Yield sources, then tokens, then the whole answer."""

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
    """Another engine, reached at an address. Nothing is sent before it is request."""

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
