"""A store's statistics: its contents, and how often they were used."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ragcache.engine.store_config import StoreParts
from ragcache.engine.usage_log import UsageLog
from ragcache.errors import StoreUnreachableError
from ragcache.models.primer import bound_primer
from ragcache.store.foreign import ForeignUsage
from ragcache.store.neighbours import NEIGHBOURS, SIMILARITY, NeighbourChoice
from ragcache.store.schema import chunks_with

PART = 1000


@dataclass(frozen=True)
class Info:
    """Counts, bytes by tier, and hits over the life of the store.

    pending: chunks without stored KV: not computed yet, evicted by the store, or held in memory alone
    misses:  blocks that had to be computed for a question
    primer_tokens: length of the primer that passages are encoded after; 0: no primer
    neighbours: the most other passages that a passage is encoded after
    neighbours_from: how these are chosen: nearest by "similarity", or earlier in the same "document"
    pinned:  blocks that are protected from eviction
    foreign: usage of the cache of passages that belong to no document; None: their KV is not kept
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
    foreign: ForeignUsage | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def info(store: StoreParts, usage: UsageLog) -> Info:
    stats, counts, bound = store.kv.stats(), store.documents.counts(), store.documents.properties()
    if not store.kv.read_only:
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
        schema_version=int(str(bound["schema"])),
        primer_tokens=len(bound_primer(bound)),
        neighbours=near.number,
        neighbours_from=near.chosen_from,
        pinned=stats.pinned,
        foreign=store.kv.foreign_usage(),
    )


def _pending(store: StoreParts) -> int:
    """Count the chunks without stored KV. If the remote is unreachable, count by the documents' records."""
    computed_never = sum(document.num_pending for document in store.documents.documents())
    try:
        lost = sorted(store.documents.handles() - set(store.kv.keys()))
    except StoreUnreachableError:
        return computed_never
    with store.documents.database.read() as connection:
        parts = (lost[start : start + PART] for start in range(0, len(lost), PART))
        return computed_never + sum(chunks_with(connection, part) for part in parts)
