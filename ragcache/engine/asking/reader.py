"""One question, from its prompt to the last token of its answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ragcache.engine.answer import Answer, Done, Event, Sources, Usage
from ragcache.engine.asking.contexts import Contexts, Seat
from ragcache.engine.asking.estimate import PrefillEstimate
from ragcache.engine.asking.prefixes import Prefixes
from ragcache.engine.asking.prompts import Prompts
from ragcache.engine.asking.reading import Clock, Kept, OpenQuestion, Reading
from ragcache.engine.asking.supply import Ready, Supply
from ragcache.engine.asking.writing import AnswerSoFar, AnswerWriter
from ragcache.fusion.fuse import Fused, fuse
from ragcache.kv.buffers import SharedContext
from ragcache.models.limits import limited
from ragcache.models.lm import LanguageModel
from ragcache.prompt import PromptEnds
from ragcache.retrieval.retriever import Hit


class Reader:
    """Answers prompts over hits that are already retrieved. Thread-safe."""

    def __init__(
        self,
        lm: LanguageModel,
        prompts: Prompts,
        supply: Supply,
        prefixes: Prefixes,
        contexts: Contexts,
        estimate: PrefillEstimate,
    ) -> None:
        self.lm = lm
        self.prompts = prompts
        self.supply = supply
        self.prefixes = prefixes
        self.contexts = contexts
        self.estimate = estimate
        self.writer = AnswerWriter(lm)

    def stream(
        self, ends: PromptEnds, hits: Sequence[Hit], reading: Reading, clock: Clock, kept: Kept | None = None
    ) -> Iterator[Event]:
        """Wait until there is memory for prompt and answer, then read and answer.

        Raises AnswerTooLargeError, CancelledError, TimedOutError, and what `Prompts.prompt` raises.
        """
        limit = reading.limit(clock.started)
        if kept is None:  # a conversation's order is what it was, and its later prompts would lack the hint
            ends, hits = self.prompts.ordered(ends, hits, reading)
        prompt, dropped = self.prompts.prompt(ends, hits, reading)
        asked = OpenQuestion(prompt, hits[: len(hits) - dropped], dropped, reading, clock, limit, kept)
        need = self.prompts.need(prompt, reading)
        # The prefix tree keeps what runs as text, passages included; a placed context of blocks stays where it is.
        keep = reading.method.reuses_blocks and bool(prompt.chunk_ids)
        waiting = time.perf_counter()
        with self.contexts.admit(asked.context_key, need, limit, keep=keep) as seat:
            clock.queue_s = time.perf_counter() - waiting
            yield from self._answer(asked, seat)

    def drop_deleted(self) -> None:
        """Let go of what was computed over passages that are gone."""
        self.prefixes.drop_deleted()
        self.contexts.forget()

    def clear(self) -> None:
        """Let go of all exact KV."""
        self.prefixes.clear()
        self.contexts.forget()

    def _answer(self, asked: OpenQuestion, seat: Seat) -> Iterator[Event]:
        with ExitStack() as leases:
            with limited(asked.limit):
                ready = leases.enter_context(self.supply.ready(asked, seat.placed))
            yield Sources(ready.sources)
            asked.limit.check()
            with limited(asked.limit):
                fused = self._read(asked, ready, seat)
        asked.clock.read(ready.loaded, fused, ready.prefix.encode_s)
        written = AnswerSoFar()
        try:
            yield from self.writer.write(asked, fused, written)
        finally:
            self.supply.keep(asked, ready, written.run_ids, fused)
            fused.cache.release()
        if asked.kept is not None:
            asked.kept.answered(asked.hits, written.text, written.said(self.lm))
        yield Done(_answer(asked, ready, fused, written))

    def _read(self, asked: OpenQuestion, ready: Ready, seat: Seat) -> Fused:
        """Run the prompt over the context of another question where there is one; else others may find this one's."""
        if not seat.is_shared or ready.base is not None:
            return self._fuse(asked, ready)
        with seat.placing(asked.limit) as found:
            if isinstance(found, SharedContext):
                return self._fuse(asked, replace(ready, base=found))
            fused = self._fuse(asked, ready)
            found(fused.share())
            return fused

    def _fuse(self, asked: OpenQuestion, ready: Ready) -> Fused:
        started = time.perf_counter()
        prompt, reading, path = asked.prompt, asked.reading, ready.path
        method = reading.method
        fused = fuse(
            self.lm,
            path.parts if path is not None and path.layout.separate else prompt,
            method,
            ready.loaded.blocks,
            recipe=self.supply.encoder.recipe if method.reuses_blocks else None,
            reserve_tokens=self.prompts.room(prompt.num_tokens, reading),
            evict=reading.evict,
            exact=ready.prefix.exact if ready.base is None else None,
            base=ready.base,
        )
        if not method.reuses_blocks and min(fused.computed_tokens) == fused.prompt_tokens:
            self.lm.finish()  # nothing of the prompt was known: the estimate of a full prefill learns from it
            self.estimate.add(fused.prompt_tokens, time.perf_counter() - started)
        return fused


def _answer(asked: OpenQuestion, ready: Ready, fused: Fused, written: AnswerSoFar) -> Answer:
    created = ready.prefix.created_tokens + ready.loaded.encoded_tokens
    computed = max(fused.computed_tokens) + fused.encoded_tokens + created
    cached = max(0, fused.prompt_tokens - computed)
    usage = Usage(fused.prompt_tokens, cached, len(written.ids), created, computed)
    method = asked.reading.method.name
    times = asked.clock.timings()
    return Answer(written.text, ready.sources, times, usage, method, asked.dropped, written.finish)
