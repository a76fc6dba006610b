"""Least frequently used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ragcache.store.eviction.base import Entry, EvictionPolicy
from ragcache.store.eviction.priority import PriorityOrder


class LFU(EvictionPolicy):
    """The entry with the fewest uses since it came in goes first; of equals, the one not used for the longest time.

    Without ageing: what was hot once stays. `gdsf` and `pgdsf` age.
    """

    name: ClassVar[str] = "lfu"

    def __init__(self) -> None:
        self._order = PriorityOrder()

    def insert(self, entry: Entry) -> None:
        self._order.add(entry.key, 1)

    def touch(self, key: str) -> None:
        if key in self._order:
            self._order.raise_to(key, self._order[key] + 1)

    def remove(self, key: str) -> None:
        self._order.remove(key)

    def victims(self) -> Iterator[str]:
        return self._order.ascending()
