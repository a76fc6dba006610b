"""Counts of a KV store: which blocks were asked for, and which tier served them."""

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
    """blocks:        in the durable tier
    bytes_by_tier: held now
    hits_by_tier:  blocks served since the store was opened
    misses:        keys asked for that no tier served: it had none, a damaged one, or one that was faster to compute
    damaged:       blocks found damaged and dropped
    evictions:     blocks given up by tiers with a budget
    pinned:        keys that no tier gives up
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
    """Counts accesses since the store was opened, and writes each to the trace where there is one. Thread-safe.

    hits:    blocks served, by the name of the tier that had them
    misses:  keys asked for that no tier served
    damaged: blocks found damaged
    """

    _trace: TraceWriter | None
    hits: Counter[str] = field(default_factory=Counter)
    misses: int = 0
    damaged: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def asked(self, key: str, loaded: Loaded | None) -> None:
        """A request wanted this block alone, and got what was found at once."""
        self._count(loaded)
        if self._trace is not None:
            self._trace.asked([key], [None if loaded is None else loaded.traced])

    def announced(self, keys: Sequence[str]) -> str:
        """One request wants these; `served` is told what became of each. Returns the request's name."""
        return "" if self._trace is None else self._trace.asked(keys, [None] * len(keys))

    def served(self, request: str, key: str, loaded: Loaded | None) -> None:
        """An announced access is over. None: no tier served it; it is traced when it is made."""
        self._count(loaded)
        if self._trace is not None and loaded is not None:
            self._trace.served(request, key, loaded.traced)

    def made(self, key: str, block: KVBlock) -> None:
        """A block was computed. It is an access when it was asked for before."""
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
