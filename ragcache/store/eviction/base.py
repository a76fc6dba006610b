"""The eviction contract: which block a full tier gives up. A policy knows names and sizes, no tensors and no files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple


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
