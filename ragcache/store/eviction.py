"""Eviction policies and admission filters by name, and the policy that goes by the last use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from ragcache.plugins import load

# The eviction contract: which block a full tier evicts. A policy knows keys and sizes, but no tensors or files.


class Entry(NamedTuple):
    """A block as a policy weighs it.

    num_bytes:  bytes that the tier holds
    num_tokens: tokens that would have to be computed again; 0 if unknown
    """

    key: str
    num_bytes: int
    num_tokens: int


class EvictionPolicy(ABC):
    """The order in which one tier's entries are evicted. The tier's lock is held at every call."""

    name: ClassVar[str]

    @abstractmethod
    def insert(self, entry: Entry) -> None:
        """Record a new entry. Its key is not held at this time."""

    @abstractmethod
    def touch(self, key: str) -> None:
        """Record an access to a key. A key that is not held changes no order, but an admission filter counts it."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove an entry that was evicted or deleted. An unknown key is ignored."""

    @abstractmethod
    def victims(self) -> Iterator[str]:
        """Yield all keys held, the least worth keeping first. Change nothing: the tier takes as many as it needs (and
        may skip some), then calls `evict` for each."""

    def evict(self, key: str) -> None:
        """Remove an entry that was evicted to free space, and learn from it."""
        self.remove(key)

    def admits(self, key: str, victims: Sequence[str]) -> bool:
        """Return whether a new entry is worth evicting these victims. Change nothing."""
        return True


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


# A policy's class by name. An admission filter by name: a function of a policy and the expected number of entries that
# returns a policy, which may refuse new entries; None: all are admitted.
POLICIES: dict[str, type[EvictionPolicy] | str] = {
    "hyperbolic": "ragcache.store.hyperbolic:Hyperbolic",
    "lru": LRU,
}
ADMISSIONS: dict[str, Callable[[EvictionPolicy, int], EvictionPolicy] | str | None] = {
    "all": None,
    "tinylfu": "ragcache_papers.tinylfu:TinyLFU",
}


def get_policy(name: str, admission: str = "all", entries: int = 0) -> EvictionPolicy:
    """Return a new policy, wrapped in an admission filter unless admission is "all".

    entries: expected number of entries, roughly

    Raises ConfigError that lists the known names.
    """
    kind = load("eviction policy", name, POLICIES)
    admit = load("admission filter", admission, ADMISSIONS)
    return kind() if admit is None else admit(kind(), entries)
