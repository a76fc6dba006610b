"""A machine made of numbers: a tier that serves one read after another, a model, and a clock that nobody waits for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from ragcache.engine.load_plan import BlockSize, LoadPlan
from ragcache.engine.rates import Rates
from ragcache.store.eviction import PrefillRate

TIER = "disk"
POLL_S = 0.02


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """bytes_s:   what the tier gives at a moment, in bytes/s; 0 stalls it
    tokens_s:  what the model computes
    lost:      ranks that the tier turns out not to have
    """

    bytes_s: Callable[[float], float]
    tokens_s: float
    lost: frozenset[int] = frozenset()
    clock: Clock = field(default_factory=Clock)
    rates: Rates = field(init=False)
    read: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    moved_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.rates = Rates(self.clock)

    def know(self, bytes_s: float, tokens_s: float) -> World:
        self.rates.tier(TIER).set(1e-6, bytes_s)
        self.rates.compute.set(PrefillRate(1 / tokens_s, 0.0))
        return self

    def run(self, parts: Sequence[BlockSize], *, batch_tokens: int = 1, readers: int = 8) -> float:
        """Seconds until all parts are there. Raises AssertionError after an hour of the clock."""
        self.read, self.computed = [], []
        return _Run(self, parts, batch_tokens, readers).seconds()


class _Run:
    def __init__(self, world: World, parts: Sequence[BlockSize], batch_tokens: int, readers: int) -> None:
        self.world, self.parts = world, parts
        placed = {rank: part._replace(tier=TIER) for rank, part in enumerate(parts)}
        self.split = LoadPlan(placed, world.rates, batch_tokens=batch_tokens, readers=readers)
        self.queue: deque[tuple[int, int]] = deque()  # rank, number in the rates
        self.left_bytes = 0.0  # of the first in the queue

    def seconds(self) -> float:
        started = self.world.clock.now
        while not self.split.done:
            assert self.world.clock.now - started < 3600, "it does not end"
            self._begin_reads()
            batch = self.split.next_batch()
            if batch:
                self._compute(batch)
            else:
                self._pass(POLL_S, until_read=True)
        return self.world.clock.now - started

    def _compute(self, batch: Sequence[int]) -> None:
        padded = len(batch) * max(self.parts[rank].num_tokens for rank in batch)
        self._pass(padded / self.world.tokens_s)
        self.world.rates.compute.add([self.parts[rank].num_tokens for rank in batch], padded / self.world.tokens_s)
        self.split.computed()
        self.world.computed += batch

    def _begin_reads(self) -> None:
        for rank in self.split.next_reads():
            size = self.parts[rank].num_bytes
            assert size is not None
            assert rank not in [one for one, _ in self.queue], "read twice at once"
            if not self.queue:
                self.left_bytes = size
            self.queue.append((rank, self.world.rates.tier(TIER).begin(size)))

    def _pass(self, seconds: float, *, until_read: bool = False) -> None:
        """Let time go by in steps in which the tier's rate is taken as constant."""
        clock = self.world.clock
        end = clock.now + seconds
        while clock.now < end - 1e-12:
            rate = self.world.bytes_s(clock.now)
            step = min(end - clock.now, 0.005)
            if self.queue and rate:
                step = min(step, self.left_bytes / rate)
            clock.now += step
            if self.queue:
                self.left_bytes -= step * rate
                self.world.moved_bytes += step * rate
                if self.left_bytes <= 1e-6:
                    self._has_read()
                    if until_read:
                        return

    def _has_read(self) -> None:
        rank, number = self.queue.popleft()
        if self.queue:
            self.left_bytes = self.parts[self.queue[0][0]].num_bytes
        self.world.rates.tier(TIER).end(number, moved=rank not in self.world.lost)
        if rank in self.world.lost:
            self.split.lost(rank)
        else:
            self.split.loaded(rank)
            self.world.read.append(rank)
        self._begin_reads()


def best_s(loads: Sequence[float], computes: Sequence[float]) -> float:
    """The optimum over all assignments, by trying them all; `inf` in loads for what no tier has."""
    return min(
        max(
            sum(load for load, reads in zip(loads, choice, strict=True) if reads),
            sum(compute for compute, reads in zip(computes, choice, strict=True) if not reads),
        )
        for choice in product((True, False), repeat=len(loads))
        if not any(reads and math.isinf(load) for load, reads in zip(loads, choice, strict=True))
    )
