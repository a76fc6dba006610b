"""Eviction policies and admission filters by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from ragcache.plugins import load

# The eviction contract: which block a full tier gives up. A policy knows names and sizes, no tensors and no files.


class Entry(NamedTuple):
    """An entry as a policy weighs it: bytes held, and tokens, which a recomputation would cost."""

    key: str
    num_bytes: int
    num_tokens: int


class EvictionPolicy(ABC):
    """Orders the entries of one tier. Called under the tier's lock: an implementation needs none of its own.

    weighs_tokens: whether `Entry.num_tokens` matters; where it has to be looked up, it else need not be
    """

    name: ClassVar[str]
    weighs_tokens: bool = False

    @classmethod
    def priced(cls, prefill: PrefillRate) -> Self:
        """A fresh policy for a machine on which computing an entry again costs this."""
        return cls()

    @abstractmethod
    def insert(self, entry: Entry) -> None:
        """An entry came in. Its key is not held at this time."""

    @abstractmethod
    def touch(self, key: str) -> None:
        """An entry was asked for. A key that is not held changes no order (an admission filter counts it)."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """An entry left, evicted or deleted. An unknown key is ignored."""

    @abstractmethod
    def victims(self) -> Iterator[str]:
        """All keys held, the one least worth keeping first. Changes nothing: the tier takes as many as it needs (and
        may pass over some), then calls `evict` for each."""

    def evict(self, key: str) -> None:
        """An entry left to make room: `remove`, and what the policy learns from it."""
        self.remove(key)

    def admits(self, key: str, victims: Sequence[str]) -> bool:
        """Whether a newcomer is worth these entries, which would have to go for it. Changes nothing."""
        return True


# Least recently used.


class LRU(EvictionPolicy):
    """The entry that was not used for the longest time goes first."""

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
    """Cost of a prefill of n tokens: linear * n (matrix products) + quadratic * n * n (attention).

    In seconds where rates were measured; where costs are only compared, the unit is free.
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
        """The rate of a machine that takes `factor` times as long."""
        return type(self)(self.linear * factor, self.quadratic * factor)


# An admission filter makes of a policy one that refuses newcomers, for about so many entries; None: all come in.
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
    """A fresh policy, behind an admission filter unless all are admitted.

    prefill: what computing an entry again costs; None: the policy's own idea of it
    entries: how many there may be, about

    Raises ConfigError that names those there are.
    """
    kind = load("eviction policy", name, POLICIES)
    admit = load("admission filter", admission, ADMISSIONS)
    policy = kind() if prefill is None else kind.priced(prefill)
    return policy if admit is None else admit(policy, entries)
