"""A store's figures: what it holds, and how often it was of use."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ragcache.engine.store_config import StoreParts
from ragcache.errors import StoreUnreachableError
from ragcache.files import atomic_write, write_all
from ragcache.models.primer import bound_primer
from ragcache.store.counters import KVStats
from ragcache.store.foreign import ForeignUsage
from ragcache.store.neighbours import NEIGHBOURS, SIMILARITY, NeighbourChoice
from ragcache.store.schema import chunks_with

PART = 1000


@dataclass(frozen=True)
class Info:
    """Counts, bytes by tier, and hits over the life of the store.

    pending: chunks without stored KV: not computed yet, or given up by the store, or held in memory alone
    primer_tokens: of the primer that passages are encoded behind; 0: none
    neighbours: how many other passages each passage is encoded behind, at most
    neighbours_from: which ones: nearest by "similarity", or those before it in its "document"
    foreign: passages of no document; None: none are kept
    """

    documents: int
    chunks: int
    tokens: int
    blocks: int
    pending: int
    bytes_by_tier: dict[str, int]
    hits_by_tier: dict[str, int]
    misses: int
    hit_rate: float | None
    model: str | None
    embedder: str | None
    schema_version: int
    primer_tokens: int = 0
    neighbours: int = 0
    neighbours_from: str = SIMILARITY
    pinned: int = 0
    unwritten_bytes: int = 0
    foreign: ForeignUsage | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def info(store: StoreParts, usage: UsageLog) -> Info:
    stats, counts, bound = store.kv.stats(), store.documents.counts(), store.documents.properties()
    usage.record(stats)
    near = NeighbourChoice.of(bound.get(NEIGHBOURS))
    seen = usage.read()
    return Info(
        **counts._asdict(),
        blocks=stats.blocks,
        pending=_pending(store),
        bytes_by_tier=stats.bytes_by_tier,
        hits_by_tier={name: seen.hits.get(name, 0) for name in stats.bytes_by_tier},
        misses=seen.misses,
        hit_rate=seen.hit_rate,
        model=None if "model_name" not in bound else str(bound["model_name"]),
        embedder=None if "embedder" not in bound else str(bound["embedder"]),
        schema_version=int(str(bound["schema_version"])),
        primer_tokens=len(bound_primer(bound)),
        neighbours=near.number,
        neighbours_from=near.chosen_from,
        pinned=stats.pinned,
        unwritten_bytes=stats.unwritten_bytes,
        foreign=store.kv.foreign_usage(),
    )


def _pending(store: StoreParts) -> int:
    """Where a remote cannot be asked, by what the documents say."""
    computed_never = sum(document.num_pending for document in store.documents.documents())
    try:
        lost = sorted(store.documents.handles() - set(store.kv.keys()))
    except StoreUnreachableError:
        return computed_never
    with store.documents.database.read() as connection:
        parts = (lost[start : start + PART] for start in range(0, len(lost), PART))
        return computed_never + sum(chunks_with(connection, part) for part in parts)


# Hits and misses over the life of a store, summed over all processes that ask it.


log = logging.getLogger(__name__)


class HitCounts(NamedTuple):
    """Blocks served by tier, and blocks that had to be computed."""

    hits: dict[str, int]
    misses: int

    @property
    def hit_rate(self) -> float | None:
        """Share of blocks that some tier had; None before the first question."""
        asked = sum(self.hits.values()) + self.misses
        return sum(self.hits.values()) / asked if asked else None


class UsageLog:
    """A small JSON file beside the store. It is a statistic: what cannot be written is lost, with a warning."""

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
        except (OSError, Timeout) as error:
            log.warning("%s: hit counts are not recorded (%s)", self.path, error)

    def _load(self) -> Counter[str]:
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return Counter()
        pairs = found.items() if isinstance(found, dict) else ()
        return Counter({str(name): count for name, count in pairs if isinstance(count, int)})
