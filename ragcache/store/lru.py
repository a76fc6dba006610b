"""The eviction policy that goes by the last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import ClassVar

from ragcache.store.eviction import Entry, EvictionPolicy


class LRU(EvictionPolicy):
    """The policy that evicts the least recently used entry first."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def insert(self, entry: Entry) -> None:
        self._order[entry.key] = None

    def touch(self, key: str) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: str) -> None:
        self._order.pop(key, None)

    def victims(self) -> Iterator[str]:
        return iter(self._order)
