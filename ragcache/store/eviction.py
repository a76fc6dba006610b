"""Eviction policies and admission filters by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from ragcache.plugins import load

# The eviction contract: which block a full tier evicts. A policy knows keys and sizes, but no tensors or files.


class Entry(NamedTuple):
    """An entry as a policy weighs it: bytes held, and tokens, which a recomputation would cost."""

    key: str
    num_bytes: int
    num_tokens: int


class EvictionPolicy(ABC):
    """The order in which one tier's entries are evicted. Called under the tier's lock: a policy needs no lock itself.

    weighs_tokens: whether the policy reads `Entry.num_tokens`; if not, the tier need not look the number up
    """

    name: ClassVar[str]
    weighs_tokens: bool = False

    @classmethod
    def priced(cls, prefill: PrefillRate) -> Self:
        """Return a new policy for a machine whose recomputation costs follow `prefill`."""
        return cls()

    @abstractmethod
    def insert(self, entry: Entry) -> None:
        """Record a new entry. Its key is not held at this time."""

    @abstractmethod
    def touch(self, key: str) -> None:
        """Record an access to an entry. A key that is not held changes no order (an admission filter counts it)."""

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


# Least recently used.


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


# How the cost of a prefill grows with its length.


@dataclass(frozen=True)
class PrefillRate:
    """The cost of a prefill of n tokens: linear * n (matrix products) + quadratic * n * n (attention).

    In seconds if the rates were measured; in any unit if costs are only compared.
    """

    linear: float
    quadratic: float

    @classmethod
    def of(cls, tokens_s: float, attention_share: float = 0.0) -> Self:
        """Make a rate from tokens per second, of which a share at 1,000 tokens grows with the square of the length."""
        return cls((1 - attention_share) / tokens_s, attention_share / tokens_s / 1000)

    def seconds(self, num_tokens: float) -> float:
        return self.linear * num_tokens + self.quadratic * num_tokens * num_tokens

    def scaled(self, factor: float) -> Self:
        """Return the rate of a machine that takes `factor` times as long."""
        return type(self)(self.linear * factor, self.quadratic * factor)


# An admission filter wraps a policy, for about so many entries, so that it may refuse new ones; None: all are admitted.
POLICIES: dict[str, type[EvictionPolicy] | str] = {
    "lru": LRU,
    "gdsf": "ragcache_papers.gdsf:GDSF",
    "pgdsf": "ragcache_papers.gdsf:PGDSF",
}
ADMISSIONS: dict[str, Callable[[EvictionPolicy, int], EvictionPolicy] | str | None] = {
    "all": None,
    "tinylfu": "ragcache_papers.tinylfu:TinyLFU",
}


def get_policy(
    name: str, admission: str = "all", prefill: PrefillRate | None = None, entries: int = 0
) -> EvictionPolicy:
    """Return a new policy, wrapped in an admission filter unless admission is "all".

    prefill: cost of computing an entry again; None: the policy's own estimate
    entries: expected number of entries, roughly

    Raises ConfigError that lists the known names.
    """
    kind = load("eviction policy", name, POLICIES)
    admit = load("admission filter", admission, ADMISSIONS)
    policy = kind() if prefill is None else kind.priced(prefill)
    return policy if admit is None else admit(policy, entries)
