"""Hits and misses over the life of a store, summed over all processes that use it."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from ragcache.errors import StoreError
from ragcache.files import atomic_write, write_all
from ragcache.store.counters import KVStats

log = logging.getLogger(__name__)


class HitCounts(NamedTuple):
    """Blocks served by tier, and blocks that had to be computed."""

    hits: dict[str, int]
    misses: int

    @property
    def hit_rate(self) -> float | None:
        """Return the share of blocks that some tier had, or None before the first question."""
        reads = sum(self.hits.values()) + self.misses
        return sum(self.hits.values()) / reads if reads else None


class UsageLog:
    """A small JSON file beside the store. It is a statistic: counts that cannot be written are lost, with a warning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._counted: Counter[str] = Counter()

    def read(self) -> HitCounts:
        counts = self._load()
        misses = counts.pop("misses", 0)
        return HitCounts(dict(counts), misses)

    def record(self, stats: KVStats) -> None:
        """Add what this process counted since the last call."""
        now = Counter({**stats.hits_by_tier, "misses": stats.misses})
        new = now - self._counted
        if not new:
            return
        try:
            with FileLock(self.path.with_suffix(".lock"), timeout=1.0):
                total = self._load() + new
                with atomic_write(self.path) as file:
                    write_all(file, json.dumps(dict(total)).encode())
            self._counted = now
        except (OSError, Timeout, StoreError) as error:
            log.warning("%s: hit counts are not recorded (%s)", self.path, error)

    def _load(self) -> Counter[str]:
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return Counter()
        pairs = found.items() if isinstance(found, dict) else ()
        return Counter({str(name): count for name, count in pairs if isinstance(count, int)})
