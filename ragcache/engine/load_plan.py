"""Which blocks of one question are read and which are computed: the faster of both, both at once.

Blocks stand in a row, those first that are cheapest to load for what they cost to compute. Readers take from the front,
the model from the end, each only what it is expected to have done before the other would have done all that is left. So
the two meet where both end at the same time: one that proves slow takes fewer. A block goes one way only: what has
begun is waited for.

With right estimates this takes no longer than reading all blocks, and no longer than computing all: what one side
begins would have been done later by the other alone. It is not always the best split: blocks are taken one by one, and
the last one begun may end up to its own length after the optimum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ragcache.engine.rates import Rates

# Smaller gains are not worth computing for: that costs cores and hides small errors of estimates.
MIN_GAIN_S = 0.01


class BlockSize(NamedTuple):
    """One block: its tokens, the bytes that reading it moves (None where no tier has it), and the tier that has it."""

    num_tokens: int
    num_bytes: int | None = None
    tier: str = ""


class LoadPlan:
    """The state of one question. It starts nothing itself and is not thread-safe; whoever does the work tells it what
    came of it. Parts are named by their rank in the question's order.

    batch_tokens: padded tokens that are best computed together
    readers:      reads in progress at most
    reading:      ranks whose reads have begun already, while retrieval still ranked
    """

    def __init__(
        self,
        parts: Sequence[BlockSize],
        rates: Rates,
        *,
        batch_tokens: int,
        readers: int,
        reading: Sequence[int] = (),
    ) -> None:
        self._parts = parts
        self._rates = rates
        self._batch_tokens = batch_tokens
        self._readers = readers
        self._reading = set(reading)
        free = [rank for rank in range(len(parts)) if rank not in self._reading]
        self._missing = [rank for rank in free if parts[rank].num_bytes is None]
        readable = [rank for rank in free if parts[rank].num_bytes is not None]
        self._waiting = sorted(readable, key=self._load_share)
        self._computing: tuple[int, ...] = ()
        self._computing_until = self._computing_since = 0.0

    @property
    def done(self) -> bool:
        return not (self._reading or self._missing or self._waiting or self._computing)

    # Reading

    def next_reads(self) -> list[int]:
        """Ranks to read from now on; they count as begun."""
        begun: list[int] = []
        ahead = self._backlog_s()
        while self._waiting and self._may_read(self._waiting[0], ahead):
            rank = self._waiting.pop(0)
            ahead[self._parts[rank].tier] += self._load_s(rank)
            self._reading.add(rank)
            begun.append(rank)
        return begun

    def _may_read(self, rank: int, ahead: Mapping[str, float]) -> bool:
        tier = self._parts[rank].tier
        # The first read of an unknown tier goes alone: it tells how many more to begin.
        if len(self._reading) >= (self._readers if self._rates.knows(tier) else 1):
            return False
        arrives_s = ahead[tier] + self._load_s(rank)
        # Beyond what any computation takes, the model may come first to what is only waiting to be read.
        if self._reading and arrives_s > min(self._compute_s([one]) for one in self._waiting):
            return False
        # The gain stands on either side's own rule, so that one of the two always begins.
        return arrives_s <= self._computing_all_s() + MIN_GAIN_S

    def loaded(self, rank: int) -> None:
        """The part has been read."""
        self._reading.discard(rank)

    def lost(self, rank: int) -> None:
        """The tier could not give the part: it has to be computed."""
        self._reading.discard(rank)
        self._missing.append(rank)

    # Computing

    def next_batch(self) -> tuple[int, ...]:
        """Ranks to compute together from now on; none: wait for what is being read."""
        batch = tuple(self._missing_batch() or self._taken_batch())
        self._missing = [rank for rank in self._missing if rank not in batch]
        self._waiting = [rank for rank in self._waiting if rank not in batch]
        self._computing = batch
        self._computing_since = self._rates.clock()
        self._computing_until = self._computing_since + self._compute_s(batch)
        return batch

    def _missing_batch(self) -> list[int]:
        """The longest first, so that chunks of like length run together."""
        batch: list[int] = []
        for rank in self._longest_first(self._missing):
            if not self._fits(batch, rank):
                break
            batch.append(rank)
        return batch

    def _taken_batch(self) -> list[int]:
        """Take chunks from the end of the row, as far as computing ends before reading would."""
        batch: list[int] = []
        left = list(self._waiting)
        while left and self._fits(batch, left[-1]):
            if self._compute_s([*batch, left[-1]]) + MIN_GAIN_S > self._reading_s(left):
                break
            batch.append(left.pop())
        return batch

    def computed(self) -> None:
        """The batch has been computed."""
        self._computing = ()

    # Expectations

    def _backlog_s(self) -> dict[str, float]:
        """Seconds until the reads in progress have arrived, of all questions, by tier."""
        return {tier: self._rates.backlog_s(tier) for tier in {self._parts[rank].tier for rank in self._waiting}}

    def _reading_s(self, ranks: Sequence[int]) -> float:
        """Seconds until these would have been read, after what is in progress. Tiers are read side by side."""
        ahead = self._backlog_s()
        for rank in ranks:
            ahead[self._parts[rank].tier] += self._load_s(rank)
        return max(ahead.values(), default=0.0)

    def _computing_all_s(self) -> float:
        """Seconds until the model alone would have computed all that nobody has begun to read."""
        total_s = self._batch_left_s()
        batch: list[int] = []
        for rank in self._longest_first([*self._missing, *self._waiting]):
            if not self._fits(batch, rank):
                total_s += self._compute_s(batch)
                batch = []
            batch.append(rank)
        return total_s + self._compute_s(batch)

    def _batch_left_s(self) -> float:
        """Seconds until the batch is computed. A late one is expected to take as long again."""
        if not self._computing:
            return 0.0
        now = self._rates.clock()
        return self._computing_until - now if now < self._computing_until else now - self._computing_since

    def _load_share(self, rank: int) -> float:
        return self._load_s(rank) / max(self._compute_s([rank]), 1e-12)

    def _load_s(self, rank: int) -> float:
        return self._rates.load_s(self._parts[rank].tier, self._parts[rank].num_bytes or 0)

    def _compute_s(self, ranks: Sequence[int]) -> float:
        return self._rates.compute_s([self._parts[rank].num_tokens for rank in ranks]) if ranks else 0.0

    def _longest_first(self, ranks: Sequence[int]) -> list[int]:
        return sorted(ranks, key=lambda rank: -self._parts[rank].num_tokens)

    def _fits(self, batch: Sequence[int], rank: int) -> bool:
        """Whether the part can join the batch, which is padded to its longest; any part fits alone."""
        together = [*batch, rank]
        padded = len(together) * max(self._parts[one].num_tokens for one in together)
        return not batch or padded <= self._batch_tokens
