"""The eviction policies as lists and formulas, evaluated anew for every entry each time, without the policies' code."""

from __future__ import annotations

import math


class LRUModel:
    """The least recently used first. held: bytes by key, in the order of use"""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def insert(self, key: str, num_bytes: int) -> None:
        self.held[key] = num_bytes

    def touch(self, key: str) -> None:
        if key in self.held:
            self.held[key] = self.held.pop(key)

    def remove(self, key: str) -> None:
        self.held.pop(key, None)

    evict = remove

    def order(self) -> list[str]:
        return list(self.held)


class HyperbolicModel(LRUModel):
    """The lowest `uses ** power / age` first, with the power learnt beside a list of what LRU would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}
        self.uses: dict[str, float] = {}
        self.last: dict[str, int] = {}
        self.now, self.power, self.most = 0, 2.0, 0
        self.lru: list[str] = []

    def insert(self, key: str, num_bytes: int) -> None:
        if key in self.lru:
            self.power = max(0.0, self.power - 3 / (len(self.held) + 1))
        before = len(self.held)
        self.held[key] = num_bytes
        self.most = max(self.most, sum(self.held.values()))
        self.use(key, num_bytes, before)

    def touch(self, key: str) -> None:
        if key in self.held:
            if key not in self.lru:
                self.power = min(4.0, self.power + 3 / (len(self.held) + 1))
            self.use(key, self.held[key], len(self.held) - 1)

    def use(self, key: str, num_bytes: int, others: int) -> None:
        self.now += 1
        age = self.now - self.last.get(key, 0)
        self.uses[key] = self.uses[key] + min(1.0, age / (others + 1)) if key in self.uses else 1.0
        self.last[key], self.sizes[key] = self.now, num_bytes
        self.lru = [one for one in self.lru if one != key] + [key]
        while sum(self.sizes[one] for one in self.lru) > self.most:
            del self.lru[0]

    def remove(self, key: str) -> None:
        self.held.pop(key, None)
        self.uses.pop(key, None)
        self.lru = [one for one in self.lru if one != key]

    def evict(self, key: str) -> None:
        self.held.pop(key, None)

    def order(self) -> list[str]:
        def worth(key: str) -> tuple[float, int]:
            group = math.floor(4 * math.log2(self.uses[key]))
            return self.power * group / 4 - math.log2(self.now - self.last[key] + 1), self.last[key]

        return sorted(self.held, key=worth)


MODELS = {"lru": LRUModel, "hyperbolic": HyperbolicModel}
