"""Greedy-dual-size-frequency, and RAGCache's form of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ragcache.kv.prefill import PrefillRate
from ragcache.store.eviction.base import Entry, EvictionPolicy
from ragcache.store.eviction.priority import PriorityOrder


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
        self._order.add(entry.key, self._priority(entry.key))

    def touch(self, key: str) -> None:
        if key in self._uses:
            self._uses[key] += 1
            self._order.raise_to(key, self._priority(key))

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

    def cost(self, entry: Entry) -> float:
        return self._prefill.seconds(entry.num_tokens)
