"""The tier contract: a place where block bytes live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from ragcache.kv.block import KVBlock


class Usage(NamedTuple):
    blocks: int
    num_bytes: int


class Tier(ABC):
    """Holds blocks by key. Safe to call from several threads.

    name:      what statistics and `locate` call it
    durable:   whether a block outlives the process; a durable tier keeps every block it is given, another may refuse
    evictions: blocks given up so far to make room
    """

    name: ClassVar[str]
    durable: ClassVar[bool]
    evictions: int = 0

    @abstractmethod
    def put(self, key: str, block: KVBlock) -> KVBlock | None:
        """Hold a block, in place of one of the same key; None when it is not kept (a durable tier raises instead).

        Returns the block as `get` would: with a lossy codec not the one given. It stays valid after eviction.
        """

    @abstractmethod
    def get(self, key: str) -> KVBlock | None:
        """The block, marked as used, or None. It stays valid when it is evicted or deleted later.

        Raises DamagedBlockError: the block is still there, but nobody gets it.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget a block; an absent one is fine."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether the block is here. Changes nothing, not even what is evicted next."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes that reading the block moves, or None when it is not here. Changes and reads nothing."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """The keys held when asked; deletions during the iteration are fine."""

    @abstractmethod
    def usage(self) -> Usage:
        """Blocks and bytes held now."""

    def prefetch(self, keys: Sequence[str]) -> None:
        """Say that these are wanted next; returns at once. Does nothing where nothing can be gained."""
        return

    def close(self) -> None:
        """Let go of what is held in this process."""
        return
