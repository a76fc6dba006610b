"""Admission by frequency (TinyLFU): whether a new entry is worth the entries that it would evict."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import ClassVar

import xxhash

from ragcache.errors import ConfigError
from ragcache.store.eviction import Entry, EvictionPolicy

HIGHEST = 15


class CountMinSketch:
    """Counts how often keys were seen; apart from ageing, a count is never too low (Cormode and Muthukrishnan 2005).

    width:  counters in each of the four rows, rounded up to a power of two. A counter stops at 15, as in TinyLFU
    sample: after this many keys all counters are halved, so that older uses count less (TinyLFU, "reset")

    Conservative: only the lowest of a key's counters grow.
    """

    def __init__(self, width: int = 1 << 16, sample: int | None = None) -> None:
        if width < 1 or (sample is not None and sample < 1):
            raise ConfigError(f"a sketch of width {width} with a sample of {sample}: both are 1 or more")
        self._mask = (1 << (width - 1).bit_length()) - 1
        self._rows = [array("B", bytes(self._mask + 1)) for _ in range(4)]
        self._sample = sample or 10 * (self._mask + 1)
        self._seen = 0

    def add(self, key: str) -> None:
        one, two, three, four = self._cells(key)
        first, second, third, fourth = self._rows
        lowest = min(first[one], second[two], third[three], fourth[four])
        if lowest < HIGHEST:
            for row, cell in ((first, one), (second, two), (third, three), (fourth, four)):
                if row[cell] == lowest:
                    row[cell] += 1
        self._seen += 1
        if self._seen >= self._sample:
            self._rows = [array("B", (count >> 1 for count in row)) for row in self._rows]
            self._seen //= 2

    def estimate(self, key: str) -> int:
        one, two, three, four = self._cells(key)
        first, second, third, fourth = self._rows
        return min(first[one], second[two], third[three], fourth[four])

    def _cells(self, key: str) -> tuple[int, int, int, int]:
        digest = xxhash.xxh3_128_intdigest(key.encode())
        mask = self._mask
        return digest & mask, (digest >> 32) & mask, (digest >> 64) & mask, (digest >> 96) & mask


class TinyLFU(EvictionPolicy):
    """An admission filter before another policy (Einziger, Friedman and Manes 2017).

    Every request is counted in a sketch, also for keys that are not held. A new entry replaces others only if it was
    requested more often; if several would be evicted, more often than all of them together, as entries differ in size
    (Einziger et al. 2021, "aggregated victims"). While there is room, all are admitted.
    """

    name: ClassVar[str] = "tinylfu"

    def __init__(self, policy: EvictionPolicy, entries: int = 0) -> None:
        self._policy = policy
        self._sketch = CountMinSketch(max(1 << 16, entries))

    def insert(self, entry: Entry) -> None:
        self._policy.insert(entry)

    def touch(self, key: str) -> None:
        self._sketch.add(key)
        self._policy.touch(key)

    def remove(self, key: str) -> None:
        self._policy.remove(key)

    def evict(self, key: str) -> None:
        self._policy.evict(key)

    def victims(self) -> Iterator[str]:
        return self._policy.victims()

    def admits(self, key: str, victims: Sequence[str]) -> bool:
        if not victims:
            return True
        return self._sketch.estimate(key) > sum(self._sketch.estimate(victim) for victim in victims)
