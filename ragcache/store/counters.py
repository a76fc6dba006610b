"""Counts of a KV store: which blocks were requested, and which tier served them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ragcache.kv.block import KVBlock


class Loaded(NamedTuple):
    """A block and the name of the tier that had it."""

    block: KVBlock
    tier: str


@dataclass(frozen=True)
class KVStats:
    """Counts of a KV store.

    blocks:        number in the durable tier
    bytes_by_tier: bytes held now
    hits_by_tier:  blocks served since the store was opened
    misses:        requested keys that no tier served: the block was absent, damaged, or faster to compute
    damaged:       blocks found damaged and dropped
    evictions:     blocks evicted by tiers with a budget
    pinned:        keys that are never evicted
    """

    blocks: int
    bytes_by_tier: dict[str, int]
    hits_by_tier: dict[str, int]
    misses: int
    damaged: int
    evictions: int
    pinned: int = 0


@dataclass(eq=False, repr=False)
class AccessCounts:
    """Counters of the accesses since the store was opened. Thread-safe.

    hits:    blocks served, by the name of the tier that had them
    misses:  requested keys that no tier served
    damaged: blocks found damaged
    """

    hits: Counter[str] = field(default_factory=Counter)
    misses: int = 0
    damaged: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, loaded: Loaded | None) -> None:
        """Count an access to a block. loaded: None if no tier served it"""
        with self._lock:
            if loaded is None:
                self.misses += 1
            else:
                self.hits[loaded.tier] += 1

    def found_damaged(self) -> None:
        with self._lock:
            self.damaged += 1
