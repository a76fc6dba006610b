"""Counts of a KV store: which blocks were requested, and which tier served them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ragcache.kv.block import KVBlock
from ragcache.store.trace import TraceWriter


class Loaded(NamedTuple):
    """A block and the name of the tier that had it."""

    block: KVBlock
    tier: str

    @property
    def traced(self) -> tuple[int, int, str]:
        return self.block.num_bytes, self.block.num_tokens, self.tier


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
    """Counters of the accesses since the store was opened. Each access is also written to the trace, if there is a
    trace. Thread-safe.

    hits:    blocks served, by the name of the tier that had them
    misses:  requested keys that no tier served
    damaged: blocks found damaged
    """

    _trace: TraceWriter | None
    hits: Counter[str] = field(default_factory=Counter)
    misses: int = 0
    damaged: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def asked(self, key: str, loaded: Loaded | None) -> None:
        """Count an access to a single block, with its result."""
        self._count(loaded)
        if self._trace is not None:
            self._trace.asked([key], [None if loaded is None else loaded.traced])

    def announced(self, keys: Sequence[str]) -> str:
        """Record the keys that a request needs and return the request's name. Report each key's outcome with
        `served`."""
        return "" if self._trace is None else self._trace.asked(keys, [None] * len(keys))

    def served(self, request: str, key: str, loaded: Loaded | None) -> None:
        """Count an announced access. None: no tier served the block; it is traced when it is made."""
        self._count(loaded)
        if self._trace is not None and loaded is not None:
            self._trace.served(request, key, loaded.traced)

    def made(self, key: str, block: KVBlock) -> None:
        """Record that a block was computed. This is an access if the block was requested before."""
        if self._trace is not None:
            self._trace.made(key, block.num_bytes, block.num_tokens)

    def found_damaged(self) -> None:
        with self._lock:
            self.damaged += 1

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def _count(self, loaded: Loaded | None) -> None:
        with self._lock:
            if loaded is None:
                self.misses += 1
            else:
                self.hits[loaded.tier] += 1
