"""The engine that runs the model in this process: from a request to the last token of its answer."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ragcache.engine.admission import Size, kv_bytes, tokens_within
from ragcache.engine.answer import Done, Event, Sources
from ragcache.engine.caches.prefix_cache import PrefixStats
from ragcache.engine.caches.prefixes import Prefixes
from ragcache.engine.caches.shared_prefixes import MemoryNeed, SharedPrefixes, SharedPrefixRef
from ragcache.engine.estimate import PrefillEstimate
from ragcache.engine.kv_lookup import KVLookup
from ragcache.engine.output import OutputProcessor, write
from ragcache.engine.prompts import ANSWER_TOKENS, Prompts
from ragcache.engine.request import Request, RequestOptions
from ragcache.fusion.fuse import FuseOutput, prefill
from ragcache.fusion.place_check import place_kernel
from ragcache.models.card import eos_token_ids
from ragcache.models.deadline import limited
from ragcache.models.generate import decode
from ragcache.models.graphs import use_graphs
from ragcache.models.language_model import LanguageModel
from ragcache.models.machine import translate_device_errors
from ragcache.models.scheduler import PassStats

WARM_TOKENS = 16


@dataclass(eq=False, repr=False)
class LocalEngine:
    """Answers prompts over retrieved hits, with the model in this process. Thread-safe.

    graph_bytes: see `use_graphs`. Graphs are made for the first question, or by `warm_up`, because adding documents
                 needs none
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

    def of(self, salt: str) -> LocalEngine:
        """Return the engine for another salt.

        The two engines share the model, its memory and all budgets, but neither finds KV of the other.
        """
        prefixes, estimate = self.prefixes.of(salt), PrefillEstimate()
        lookup = self.lookup.of(salt, prefixes, estimate.add)
        prompts = self.prompts.of(lookup.encoder, prefixes.count)
        return replace(self, prompts=prompts, lookup=lookup, prefixes=prefixes, estimate=estimate)

    def check(self, options: RequestOptions) -> None:
        self.prompts.check(options.method)
        options.sampling.check_ids(self.lm.vocab_size, self.lm.name)

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Wait until there is memory for prompt and answer, then read the prompt and yield the answer's events.

        Raises AnswerTooLargeError, CancelledError and TimedOutError.
        """
        use_graphs(self.lm, self.graph_bytes)
        prompt, options, clock, limit = request.prompt, request.options, request.clock, request.limit
        method, need = options.method, self._need(request)
        # The prefix tree keeps running text, passages included; a placed context of blocks stays in its buffers.
        keep = method.reuses_blocks and bool(prompt.chunk_ids)
        key = request.context_key if self.lookup.shares_context_of(method) else None
        if key is not None:
            own = self.lookup.encoder
            key = (own.salt, request.filter_salt if own.recipe.neighbours else "", key)
        waiting = time.perf_counter()
        with translate_device_errors(), self.contexts.admit(key, need, limit, keep=keep) as shared:
            clock.queue_s = time.perf_counter() - waiting
            with ExitStack() as leases:
                with limited(limit):
                    resolved = leases.enter_context(self.lookup.resolve(request, shared.placed))
                yield Sources(resolved.sources, options.choice.label, options.choice.why)
                limit.check()
                # Read over another question's context if there is one; else publish this question's context to others.
                with limited(limit), shared.placing(limit) as publish:
                    started = time.perf_counter()
                    fused = prefill(
                        self.lm,
                        request.plan,
                        resolved.loaded.blocks,
                        reserve_tokens=self.prompts.room_at_first(prompt.num_tokens, options),
                        exact=resolved.prefix.exact if shared.placed is None else None,
                        base=shared.placed,
                    )
                    if publish is not None:
                        publish(fused.share())
                if not method.reuses_blocks and min(fused.computed_tokens) == fused.prompt_tokens:
                    self.lm.finish()  # no token was known, so the estimate of a full prefill can learn
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
            if request.earlier_turns is not None:
                request.earlier_turns.answered(request.hits, output.turn, output.said(self.lm))
            counts = fused.counts(resolved.prefix.created_tokens + resolved.loaded.encoded_tokens)
            usage = output.usage(counts, self.lookup.pin(request, resolved.path))
            yield Done(output.answer(request, resolved.sources, usage))

    def clear(self) -> None:
        """Drop exact KV and shared contexts."""
        self.prefixes.clear()
        self.contexts.clear()

    def warm_up(self) -> None:
        """Run the model once now, because its first pass takes longer and would delay the first question."""
        use_graphs(self.lm, self.graph_bytes)
        place_kernel(self.lm, ())  # compile the kernel and compare its results
        cache = self.lm.new_cache(WARM_TOKENS)
        self.lm.run([rank % self.lm.vocab_size for rank in range(WARM_TOKENS)], 0, cache)
        cache.release()

    def prefix_stats(self) -> PrefixStats:
        return self.prefixes.stats()

    def pass_stats(self) -> PassStats:
        return self.lm.scheduler.stats()

    def _need(self, request: Request) -> MemoryNeed:
        """Return the memory of a question's KV: the prompt, the tokens that the method adds, and the answer.

        The first size is for all of these. The second is for suffix and answer alone, if another question has placed
        the passages. For an answer of unlimited length, both are for its beginning, and state the rest as `more_bytes`.
        """
        read, options = request.plan.layout.num_tokens, request.options
        room, most = self.prompts.room_at_first(read, options), self._most(read, options)
        whole, own = (
            Size(
                before + room, kv_bytes(self.lm, before + room), kv_bytes(self.lm, before + most) if most > room else 0
            )
            for before in (read, len(request.prompt.suffix_ids))
        )
        return MemoryNeed(whole, own)

    def _most(self, read: int, options: RequestOptions) -> int:
        """Return the tokens of the longest possible answer to a prompt of `read` tokens.

        An answer of unlimited length may grow into half of the memory of all answers, unless the context is full
        before. The other half is kept for answers that begin.
        """
        room, first = self.prompts.room(read, options), self.prompts.room_at_first(read, options)
        budget = self.contexts.admission.budget_bytes
        free = min(budget // 2, budget - kv_bytes(self.lm, read + first))
        return max(first, min(room, tokens_within(self.lm, free) - read))

    def _decode(
        self, request: Request, fused: FuseOutput, output: OutputProcessor, shared: SharedPrefixRef, most: int
    ) -> Generator[int, None, None]:
        cache, read, options = fused.cache, fused.cache.own_tokens, request.options

        def more() -> int:
            """Make room for half as many tokens as the cache holds, but at least ANSWER_TOKENS; return how many.

            The room stays within `most`.
            """
            used = cache.own_tokens
            capacity = min(max(ANSWER_TOKENS, used // 2), read + most - used)
            shared.grow(kv_bytes(self.lm, used + capacity), request.limit)
            cache.make_room(capacity)
            return capacity

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
            thoughts=request.thoughts(self.lm.tokenizer),
            room=self.prompts.room_at_first(fused.next_position, options),
        )
