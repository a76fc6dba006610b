"""Which blocks of one question are read and which are computed: the faster of both, both at once.

Blocks stand in a row, those first that are cheapest to load for what they cost to compute. Readers take from the front,
the model from the end, each only what it is expected to have done before the other would have done all that is left. So
the two meet where both end at the same time, whatever the estimates were: one that proves slow takes fewer. When
nothing is left to take, a block that is late with one side is begun by the other as well; the first to finish wins.

If the estimates are right this takes no longer than reading all blocks, and no longer than computing all: what one side
begins would have been done later by the other alone. It is not always the best split: blocks are taken one by one, and
the last one begun may end up to its own length after the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# What is won by less is not worth doing otherwise than reading: it costs cores and hides small errors of estimates.
MIN_GAIN_S = 0.01
# A read that takes longer is as late as it is, whatever is expected of its tier.
HANGING_S = 10.0


class Part(NamedTuple):
    """One block: its tokens, and the bytes that reading it moves; None where no tier has it."""

    num_tokens: int
    num_bytes: int | None


class Costs(Protocol):
    """What is expected now, in seconds."""

    def load_s(self, num_bytes: int) -> float:
        """One read behind those that are on their way."""
        ...

    def backlog_s(self) -> float:
        """Until the reads on their way have arrived."""
        ...

    def compute_s(self, lengths: Sequence[int]) -> float:
        """One batch of chunks of these lengths in tokens."""
        ...

    def explore_reading(self) -> bool:
        """Whether to read one block although computing seems faster. Asked only when it would be done."""
        ...

    def explore_computing(self) -> bool:
        """Whether to compute one batch although reading seems faster. Asked only when it would be done."""
        ...


@dataclass(frozen=True)
class Limits:
    """batch_tokens: padded tokens that are best computed together. readers: reads on their way at most."""

    batch_tokens: int
    readers: int


class Split:
    """The state of one question. It starts nothing itself and is not thread-safe; whoever does the work tells it what
    was begun and what came of it. Parts are named by their rank.

    parts:   in the question's order
    reading: ranks that are on their way already, such as those that were begun while retrieval still ranked
    """

    def __init__(
        self,
        parts: Sequence[Part],
        costs: Costs,
        clock: Callable[[], float],
        limits: Limits,
        reading: Sequence[int] = (),
    ) -> None:
        self._parts = parts
        self._costs = costs
        self._clock = clock
        self._limits = limits
        self._missing = [rank for rank, part in enumerate(parts) if part.num_bytes is None]
        self._reading = dict.fromkeys(reading, clock())  # rank -> begun at
        self._lost: set[int] = set()
        readable = [rank for rank in range(len(parts)) if rank not in self._reading and rank not in self._missing]
        self._waiting = sorted(readable, key=self._load_share)
        self._computing: tuple[int, ...] = ()
        self._computing_until = self._computing_since = 0.0
        self._done: set[int] = set()

    @property
    def done(self) -> bool:
        return len(self._done) == len(self._parts)

    def is_done(self, rank: int) -> bool:
        return rank in self._done

    def is_reading(self, rank: int) -> bool:
        return rank in self._reading

    # Reading

    def next_reads(self) -> list[int]:
        """Ranks that are to be read from now on; they count as begun."""
        begun: list[int] = []
        while (rank := self._next_read(begun)) is not None:
            begun.append(rank)
            self._reading[rank] = self._clock()
        return begun

    def _next_read(self, begun: Sequence[int]) -> int | None:
        if len(self._reading) >= self._limits.readers:
            return None
        ahead_s = self._costs.backlog_s() + sum(self._load_s(rank) for rank in begun)
        if self._waiting:
            rank = self._waiting[0]
            # Beyond what any computation takes, the model may come first to what is only waiting to be read.
            if self._reading and ahead_s + self._load_s(rank) > min(self._alone_s(one) for one in self._waiting):
                return None
            # The gain stands on either side's own rule, so that one of the two always begins.
            soon = ahead_s + self._load_s(rank) <= self._computing_all_s() + MIN_GAIN_S
            if soon or (not self._reading and self._costs.explore_reading()):
                return self._waiting.pop(0)
            return None
        return self._overtaking_read(ahead_s)

    def _overtaking_read(self, ahead_s: float) -> int | None:
        """A block that is being computed, and read sooner."""
        free = [rank for rank in self._computing if self._can_read(rank)]
        if not free or self._reading or ahead_s + self._load_s(free[0]) + MIN_GAIN_S > self._batch_left_s():
            return None
        return free[0]

    def _can_read(self, rank: int) -> bool:
        readable = self._parts[rank].num_bytes is not None and rank not in self._lost
        return readable and rank not in self._reading and rank not in self._done

    def loaded(self, rank: int) -> bool:
        """It has been read. Whether it is of use still."""
        self._reading.pop(rank, None)
        return self._finish(rank)

    def lost(self, rank: int) -> None:
        """The tier could not give it: it has to be computed."""
        self._reading.pop(rank, None)
        self._lost.add(rank)
        if rank not in self._done and rank not in self._computing:
            self._missing.append(rank)

    # Computing

    def next_batch(self) -> tuple[int, ...]:
        """Ranks that are to be computed together from now on; none: wait for what is being read."""
        batch = tuple(self._missing_batch() or self._taken_batch() or self._overtaking_batch())
        self._missing = [rank for rank in self._missing if rank not in batch]
        self._waiting = [rank for rank in self._waiting if rank not in batch]
        self._computing = batch
        self._computing_since = self._clock()
        self._computing_until = self._computing_since + self._compute_s(batch)
        return batch

    def _missing_batch(self) -> list[int]:
        """The longest first, so that chunks of like length run together."""
        batch: list[int] = []
        for rank in sorted(self._missing, key=lambda rank: -self._parts[rank].num_tokens):
            if batch and self._padded([*batch, rank]) > self._limits.batch_tokens:
                break
            batch.append(rank)
        return batch

    def _taken_batch(self) -> list[int]:
        """From the end of the row, as far as computing comes before reading."""
        batch: list[int] = []
        left = list(self._waiting)
        while left and (not batch or self._padded([*batch, left[-1]]) <= self._limits.batch_tokens):
            reading_s = self._costs.backlog_s() + sum(self._load_s(rank) for rank in left)
            if not self._is_worth([*batch, left[-1]], reading_s):
                break
            batch.append(left.pop())
        return batch

    def _is_worth(self, batch: Sequence[int], reading_s: float) -> bool:
        seconds = self._compute_s(batch)
        if seconds + MIN_GAIN_S <= reading_s:
            return True
        return len(batch) == 1 and seconds <= 2 * reading_s and self._costs.explore_computing()

    def _overtaking_batch(self) -> list[int]:
        """A block that is being read, and computed sooner."""
        late = [rank for rank in self._reading if rank not in self._done]
        if not late:
            return []
        last = late[-1]  # the others are read before
        waited_s = self._clock() - self._reading[last]
        # A read that hangs is no backlog for others, and as late as it is for who waits for it.
        left_s = max(self._costs.backlog_s(), waited_s if waited_s > HANGING_S else 0.0)
        return [last] if self._alone_s(last) + MIN_GAIN_S <= left_s else []

    def computed(self) -> list[int]:
        """The batch has been computed: ranks of it that are of use."""
        batch, self._computing = self._computing, ()
        return [rank for rank in batch if self._finish(rank)]

    def is_wanted(self) -> bool:
        """Whether any of the batch being computed has not been read meanwhile."""
        return not self._done.issuperset(self._computing)

    def abandoned(self) -> None:
        """The computation was given up because all of it has been read."""
        self._computing = ()

    # Expectations

    def _computing_all_s(self) -> float:
        """Until the model alone would have computed all that nobody has begun to read."""
        whole = self._batches_s([*self._missing, *self._waiting])
        return (self._batch_left_s() if self._computing else 0.0) + whole

    def _batches_s(self, ranks: Sequence[int]) -> float:
        total_s = 0.0
        batch: list[int] = []
        for rank in sorted(ranks, key=lambda rank: -self._parts[rank].num_tokens):
            if batch and self._padded([*batch, rank]) > self._limits.batch_tokens:
                total_s += self._compute_s(batch)
                batch = []
            batch.append(rank)
        return total_s + self._compute_s(batch)

    def _batch_left_s(self) -> float:
        """What is late is expected to take as long again."""
        now = self._clock()
        return self._computing_until - now if now < self._computing_until else now - self._computing_since

    def _load_share(self, rank: int) -> float:
        return self._load_s(rank) / max(self._alone_s(rank), 1e-12)

    def _load_s(self, rank: int) -> float:
        return self._costs.load_s(self._parts[rank].num_bytes or 0)

    def _alone_s(self, rank: int) -> float:
        return self._compute_s([rank])

    def _compute_s(self, ranks: Sequence[int]) -> float:
        return self._costs.compute_s([self._parts[rank].num_tokens for rank in ranks]) if ranks else 0.0

    def _padded(self, ranks: Sequence[int]) -> int:
        return len(ranks) * max(self._parts[rank].num_tokens for rank in ranks)

    def _finish(self, rank: int) -> bool:
        if rank in self._done:
            return False
        self._done.add(rank)
        return True
