"""Which rows run together: as many as fit, shuffled anew each epoch; all of it depends on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragcache.errors import ConfigError
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.layout import EncodedRow, layout_tokens

POOL_BATCHES = 50  # batches' worth of shuffled rows, which are packed together


class Draw(NamedTuple):
    """One row in one epoch. apart: its chunks are encoded separately; seed: of the order of its passages."""

    row: int
    apart: bool
    seed: int


@dataclass(frozen=True)
class BatchOptions:
    """
    tokens:         of a batch at most (one long row may exceed it alone)
    rows:           of a batch at most; None: as many as fit
    separate_share: of the rows that may be encoded either way, those encoded separately
    mixture:        share of each kind of row in an epoch; None: as the data has them

    Raises ConfigError for numbers out of range.
    """

    tokens: int = 8192
    rows: int | None = None
    separate_share: float = 0.5
    mixture: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.rows is not None and self.rows < 1):
            raise ConfigError(f"batch_tokens is {self.tokens} and batch_size {self.rows}; both must be at least 1")
        if not 0 <= self.separate_share <= 1:
            raise ConfigError(f"separate_share is {self.separate_share}; it must lie in 0..1")
        shares = list((self.mixture or {"": 1.0}).values())
        if min(shares) < 0 or sum(shares) <= 0:
            raise ConfigError(f"mixture is {self.mixture}; shares must be at least 0 and one of them more")


class BatchPlan:
    """An epoch's batches, by number. Iterating gives the batches of all epochs, in order, up to `num_batches`."""

    def __init__(
        self,
        rows: Sequence[EncodedRow],
        spec: TrainedTokens | None,
        options: BatchOptions,
        seed: int,
        *,
        num_batches: int | None = None,
        epochs: float = 1.0,
    ) -> None:
        self.rows, self.spec, self.options, self.seed = rows, spec, options, seed
        self._lengths = [[layout_tokens(row, spec, apart) for apart in (False, True)] for row in rows]
        self._by_kind = _by_kind(rows, options.mixture)
        self.num_batches = self._count(epochs) if num_batches is None else num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[Draw]]:
        left, epoch = self.num_batches, 0
        while left > 0:
            batches = self.epoch(epoch)[:left]
            yield from batches
            left -= len(batches)
            epoch += 1

    def _count(self, epochs: float) -> int:
        whole = int(epochs)
        count = sum(len(self.epoch(epoch)) for epoch in range(whole))
        if epochs > whole:
            count += round((epochs - whole) * len(self.epoch(whole)))
        return max(count, 1)

    def epoch(self, number: int) -> list[list[Draw]]:
        """The batches of one epoch, in order."""
        rng = random.Random(f"{self.seed}/{number}")
        draws = [self._draw(row, rng) for row in self._members(rng)]
        rng.shuffle(draws)
        mean = sum(self._length(draw) for draw in draws) / len(draws)
        pool = max(1, round(POOL_BATCHES * self.options.tokens / mean))
        batches = []
        for start in range(0, len(draws), pool):
            batches += self._pack(draws[start : start + pool])
        rng.shuffle(batches)
        return batches

    def _members(self, rng: random.Random) -> list[int]:
        if self.options.mixture is None:
            return list(range(len(self.rows)))
        total = sum(self.options.mixture.values())
        members: list[int] = []
        for kind, rows in self._by_kind.items():
            wanted = round(len(self.rows) * self.options.mixture[kind] / total)
            members += rows * (wanted // len(rows)) + rng.sample(rows, wanted % len(rows))
        return members

    def _draw(self, row: int, rng: random.Random) -> Draw:
        apart = self.rows[row].apart
        chance, seed = rng.random(), rng.getrandbits(32)
        return Draw(
            row, self.spec is not None and (chance < self.options.separate_share if apart is None else apart), seed
        )

    def _length(self, draw: Draw) -> int:
        return self._lengths[draw.row][draw.apart]

    def _pack(self, draws: Sequence[Draw]) -> list[list[Draw]]:
        """First fit, the longest first: batches are full but for the last ones."""
        batches: list[list[Draw]] = []
        room: list[int] = []  # of the batches, in tokens
        for draw in sorted(draws, key=self._length, reverse=True):
            length = self._length(draw)
            place = next((place for place, left in enumerate(room) if left >= length), len(room))
            if place == len(room):
                batches.append([])
                room.append(self.options.tokens)
            batches[place].append(draw)
            room[place] = room[place] - length if len(batches[place]) != self.options.rows else 0
        return batches


def _by_kind(rows: Sequence[EncodedRow], mixture: Mapping[str, float] | None) -> dict[str, list[int]]:
    """Rows of each kind that the mixture names. Raises ConfigError for a kind that has none."""
    found: dict[str, list[int]] = {kind: [] for kind, share in (mixture or {}).items() if share > 0}
    for index, row in enumerate(rows):
        if row.kind in found:
            found[row.kind].append(index)
    empty = [kind for kind, members in found.items() if not members]
    if empty:
        raise ConfigError(f"the mixture names {', '.join(empty)} and the data has no such row")
    return found
