"""Eviction by frequency and cost, and admission by frequency: policies of papers for a store's tiers."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

import xxhash

from ragcache.errors import ConfigError
from ragcache.store.eviction import Entry, EvictionPolicy, PrefillRate


class PriorityOrder:
    """A heap whose elements are allowed to be out of date.

    A new priority pushes a new element and leaves the old one, which is dropped when it comes up, or when such are
    the majority. So `put` is O(log n) amortised, and the k lowest keys are found in O(k log n) over the calls. Of
    equals, the least recently used is first.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, int, str]] = {}  # priority, number of the call, key
        self._heap: list[tuple[float, int, str]] = []
        self._clock = 0

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __getitem__(self, key: str) -> float:
        return self._held[key][0]

    def put(self, key: str, priority: float) -> None:
        """Count a use of a key, held or not."""
        self._clock += 1
        self._held[key] = (priority, self._clock, key)
        heapq.heappush(self._heap, self._held[key])
        self._tidy()

    def remove(self, key: str) -> None:
        """An unknown key is ignored."""
        if self._held.pop(key, None) is not None:
            self._tidy()

    def ascending(self) -> Iterator[str]:
        """All keys, lowest first; nothing may be changed while this is iterated."""
        while self._heap and self._held.get(self._heap[0][2]) != self._heap[0]:
            heapq.heappop(self._heap)
        # Best first over the heap as a tree: nothing is popped.
        front = [(self._heap[0], 0)] if self._heap else []
        while front:
            element, index = heapq.heappop(front)
            for child in range(2 * index + 1, min(2 * index + 3, len(self._heap))):
                heapq.heappush(front, (self._heap[child], child))
            if self._held.get(element[2]) == element:
                yield element[2]

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._held) + 8:
            self._heap = list(self._held.values())
            heapq.heapify(self._heap)


# Admission: whether a newcomer is worth what would have to go for it.


HIGHEST = 15


class CountMinSketch:
    """How often keys were seen, never too low but for ageing (Cormode and Muthukrishnan 2005).

    width:  counters in each of the four rows, rounded up to a power of two. A counter stops at 15, as in TinyLFU
    sample: after so many keys all counters are halved, so that what was seen long ago counts less (TinyLFU, "reset")

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

    Every request is counted in a sketch, also for keys that are not held. A newcomer takes the place of entries only
    when it was asked for more often than they; where several would have to go, more often than all of them together,
    as entries differ in size (Einziger et al. 2021, "aggregated victims"). While there is room, all come in.
    """

    name: ClassVar[str] = "tinylfu"

    def __init__(self, policy: EvictionPolicy, entries: int = 0) -> None:
        self.weighs_tokens = policy.weighs_tokens
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


# Greedy-dual-size-frequency, and RAGCache's form of it.


class GDSF(EvictionPolicy):
    """Greedy-dual-size-frequency (Cherkasova 1998, after Cao and Irani's greedy-dual-size).

        priority = clock + frequency * cost / size

    frequency: uses since the entry came in
    size:      bytes held
    cost:      1 here, which favours small entries and so the share of hits; `pgdsf` weighs recomputation
    clock:     the highest priority that was given up so far, so that what is not used any more ages

    The clock is taken when the entry is used. Of equals, the one not used for the longest time goes first.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self) -> None:
        self._order = PriorityOrder()
        self._clock = 0.0
        self._uses: dict[str, int] = {}
        self._worth: dict[str, float] = {}  # cost / size

    def cost(self, entry: Entry) -> float:
        """Cost of having the entry again."""
        return 1.0

    def insert(self, entry: Entry) -> None:
        self._uses[entry.key] = 1
        self._worth[entry.key] = self.cost(entry) / max(1, entry.num_bytes)
        self._order.put(entry.key, self._priority(entry.key))

    def touch(self, key: str) -> None:
        if key in self._uses:
            self._uses[key] += 1
            self._order.put(key, self._priority(key))

    def remove(self, key: str) -> None:
        self._order.remove(key)
        self._uses.pop(key, None)
        self._worth.pop(key, None)

    def evict(self, key: str) -> None:
        if key in self._order:
            self._clock = max(self._clock, self._order[key])
        self.remove(key)

    def victims(self) -> Iterator[str]:
        return self._order.ascending()

    def _priority(self, key: str) -> float:
        return self._clock + self._uses[key] * self._worth[key]


# An 8B model by operations; only the ratio matters to a policy. A token takes 2 * parameters in the products and
# 2 * num_layers * hidden_size for each token that it attends to, half of them on average: 32 * 4096 / 8.0e9.
PREFILL_8B = PrefillRate(1.0, 1.6e-5)


class PGDSF(GDSF):
    """RAGCache's prefix-aware greedy-dual-size-frequency (Jin et al. 2024, section 5.1, equations 1 to 3).

        priority = clock + frequency * cost / size

    with the cost of computing the entry's KV. The paper profiles a document's cost behind the prefixes that it was seen
    behind and takes the mean; a block here is encoded alone, behind no passage, so its cost depends on its own length.
    With one codec, bytes are as tokens: equal costs a token would leave frequency and age, and longer chunks gain by
    what attention costs them.
    """

    name: ClassVar[str] = "pgdsf"
    weighs_tokens = True

    def __init__(self, prefill: PrefillRate = PREFILL_8B) -> None:
        super().__init__()
        self._prefill = prefill

    @classmethod
    def priced(cls, prefill: PrefillRate) -> Self:
        return cls(prefill)

    def cost(self, entry: Entry) -> float:
        return self._prefill.seconds(entry.num_tokens)
