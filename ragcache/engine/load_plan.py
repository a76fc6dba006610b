"""Plans which blocks of a question are read and which are computed, so that both proceed at once.

Blocks are sorted by the cost of loading relative to the cost of computing, cheapest to load first. Readers take blocks
from the front and the model from the end. Each side takes a block only if it is expected to finish the block before the
other side would have finished all blocks that are left. So the two sides meet where both end at the same time, and a
side that proves slow takes fewer blocks. A block that one side has begun is not given to the other.

With right estimates this takes no longer than reading all blocks, and no longer than computing all blocks: the other
side alone would have done each block later. It is not always the best split, because blocks are taken singly, and the
last block begun may end up to its own length after the optimum.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Generic, NamedTuple, TypeVar

from ragcache.engine.rates import Rates

# Smaller gains do not justify computing, which costs cores; they are also within the estimates' errors.
MIN_GAIN_S = 0.01

Key = TypeVar("Key", bound=Hashable)


class BlockSize(NamedTuple):
    """A block: its tokens, the bytes to read (None if no tier has it), and the tier that has it."""

    num_tokens: int
    num_bytes: int | None = None
    tier: str = ""


@dataclass(eq=False, repr=False)
class LoadPlan(Generic[Key]):
    """The state of a question's blocks. It starts no work itself: its user reports which blocks were read and computed.
    Not thread-safe.

    parts:        by their keys
    batch_tokens: padded tokens that are best computed together
    readers:      most reads in progress
    reading:      parts whose reads were begun while retrieval still ranked
    load_all:     compute only parts that cannot be read, at any cost
    """

    parts: Mapping[Key, BlockSize]
    rates: Rates
    _: KW_ONLY
    batch_tokens: int
    readers: int
    reading: InitVar[Collection[Key]] = ()
    load_all: bool = False

    def __post_init__(self, reading: Collection[Key]) -> None:
        self._reading = set(reading)
        free = [key for key in self.parts if key not in self._reading]
        self._missing = [key for key in free if self.parts[key].num_bytes is None]
        stored = (key for key in free if self.parts[key].num_bytes is not None)
        self._waiting = sorted(stored, key=lambda key: self._load_s(key) / max(self._compute_s([key]), 1e-12))
        self._computing: tuple[Key, ...] = ()
        self._computing_until = self._computing_since = 0.0

    @property
    def done(self) -> bool:
        return not (self._reading or self._missing or self._waiting or self._computing)

    # Reading

    def next_reads(self) -> list[Key]:
        """Return parts to begin reading now; the plan counts them as begun."""
        begun: list[Key] = []
        ahead = self._backlog_s()
        while self._waiting and self._may_read(self._waiting[0], ahead):
            key = self._waiting.pop(0)
            ahead[self.parts[key].tier] += self._load_s(key)
            self._reading.add(key)
            begun.append(key)
        return begun

    def _may_read(self, key: Key, ahead: Mapping[str, float]) -> bool:
        tier = self.parts[key].tier
        # The first read of an unknown tier goes alone: its speed decides how many more to begin.
        is_known = self.load_all or self.rates.tier(tier).is_measured
        if len(self._reading) >= (self.readers if is_known else 1):
            return False
        arrives_s = ahead[tier] + self._load_s(key)
        # If the read would arrive after some waiting block could be computed, the model may get to that block first.
        late = self._reading and arrives_s > min(self._compute_s([other]) for other in self._waiting)
        # MIN_GAIN_S is in the rules of both sides, so that one of them always begins.
        return self.load_all or (not late and arrives_s <= self._computing_all_s() + MIN_GAIN_S)

    def loaded(self, key: Key) -> None:
        """Record that the part has been read."""
        self._reading.discard(key)

    def lost(self, key: Key) -> None:
        """Record that the tier could not provide the part, so that it has to be computed."""
        self._reading.discard(key)
        self._missing.append(key)

    # Computing

    def next_batch(self) -> tuple[Key, ...]:
        """Return parts to compute together now, or none if the caller should wait for reads."""
        batch = tuple(self._batches(self._missing)[0] if self._missing else self._taken_batch())
        self._missing = [key for key in self._missing if key not in batch]
        self._waiting = [key for key in self._waiting if key not in batch]
        self._computing = batch
        self._computing_since = self.rates.clock()
        self._computing_until = self._computing_since + self._compute_s(batch)
        return batch

    def _taken_batch(self) -> list[Key]:
        """Return parts from the end of the sorted parts, as long as computing them ends before reading them would."""
        batch: list[Key] = []
        left = [] if self.load_all else list(self._waiting)
        while left and self._fits(batch, left[-1]):
            if self._compute_s([*batch, left[-1]]) + MIN_GAIN_S > self._reading_s(left):
                break
            batch.append(left.pop())
        return batch

    def computed(self) -> None:
        """Record that the batch has been computed."""
        self._computing = ()

    def _batches(self, keys: Sequence[Key]) -> list[list[Key]]:
        """Group parts into batches, the longest first, so that parts of similar length run together."""
        batches: list[list[Key]] = []
        for key in sorted(keys, key=lambda key: -self.parts[key].num_tokens):
            if batches and self._fits(batches[-1], key):
                batches[-1].append(key)
            else:
                batches.append([key])
        return batches

    def _fits(self, batch: Sequence[Key], key: Key) -> bool:
        """Return whether the part can join the batch, which is padded to its longest; any part fits alone."""
        together = [*batch, key]
        padded = len(together) * max(self.parts[member].num_tokens for member in together)
        return not batch or padded <= self.batch_tokens

    # Expectations

    def _backlog_s(self) -> dict[str, float]:
        """Return for each tier the seconds until the reads in progress from it, of all questions, have arrived."""
        tiers = {self.parts[key].tier for key in self._waiting}
        return {tier: self.rates.tier(tier).backlog_s() for tier in tiers}

    def _reading_s(self, keys: Sequence[Key]) -> float:
        """Return the seconds until these parts would have been read, after the reads in progress.

        Tiers read in parallel.
        """
        ahead = self._backlog_s()
        for key in keys:
            ahead[self.parts[key].tier] += self._load_s(key)
        return max(ahead.values(), default=0.0)

    def _computing_all_s(self) -> float:
        """Return the seconds until the model alone would have computed every part that is not being read.

        A late batch is expected to take as long again.
        """
        left_s = 0.0
        if self._computing:
            now = self.rates.clock()
            left_s = self._computing_until - now if now < self._computing_until else now - self._computing_since
        return left_s + sum(self._compute_s(batch) for batch in self._batches([*self._missing, *self._waiting]))

    def _load_s(self, key: Key) -> float:
        return self.rates.tier(self.parts[key].tier).load_s(self.parts[key].num_bytes or 0)

    def _compute_s(self, keys: Sequence[Key]) -> float:
        return self.rates.compute.seconds([self.parts[key].num_tokens for key in keys]) if keys else 0.0
