"""Eviction by frequency, size and cost: greedy-dual-size-frequency, and RAGCache's variant."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import ClassVar, Self

from ragcache.store.eviction import Entry, EvictionPolicy
from ragcache.store.prefill_rate import PrefillRate


class PriorityOrder:
    """A heap that may hold outdated elements.

    A new priority pushes a new element and leaves the old, which is dropped when it comes up, or once outdated elements
    are the majority. So `put` is O(log n) amortised, and the k lowest keys are found in O(k log n) over the calls. Of
    equal priorities, the least recently used is first.
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
        """Remove a key. An unknown key is ignored."""
        if self._held.pop(key, None) is not None:
            self._tidy()

    def ascending(self) -> Iterator[str]:
        """Yield all keys, lowest first; nothing may be changed during the iteration."""
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


class GDSF(EvictionPolicy):
    """Greedy-dual-size-frequency (Cherkasova 1998, after Cao and Irani's greedy-dual-size).

        priority = clock + frequency * cost / size

    frequency: uses since the entry was added
    size:      bytes held
    cost:      1 here, which favours small entries and so the share of hits; `pgdsf` weighs recomputation
    clock:     the highest priority evicted so far, so that entries no longer used age

    The clock is taken when the entry is used. Of equal priorities, the least recently used is evicted first.
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
# 2 * num_layers * hidden_size for each token that it attends to, half of the tokens on average: 32 * 4096 / 8.0e9.
PREFILL_8B = PrefillRate(1.0, 1.6e-5)


class PGDSF(GDSF):
    """RAGCache's prefix-aware greedy-dual-size-frequency (Jin et al. 2024, section 5.1, equations 1 to 3).

        priority = clock + frequency * cost / size

    with the cost of computing the entry's KV. The paper profiles a document's cost after the prefixes it was seen with
    and takes the mean; a block here is encoded alone, after no passage, so its cost depends on its own length. With a
    single codec, bytes are proportional to tokens: equal costs per token would leave frequency and age, and longer
    chunks gain by the cost of their attention.
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
