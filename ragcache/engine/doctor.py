"""Checks and repairs a store. It needs no models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ragcache.engine.store_config import StoreParts
from ragcache.errors import DamagedBlockError, DamagedIndexError, MissingBlockError, SchemaVersionError
from ragcache.models.machine import advice_on
from ragcache.retrieval.faiss_kinds import Stored
from ragcache.retrieval.open_index import open_table
from ragcache.retrieval.vector_index import KINDS, VectorIndex
from ragcache.store.kv_store import collect_garbage

OTHER_VECTORS = "rebuilt: it held other vectors than the documents"


@dataclass(frozen=True)
class DoctorReport:
    """The doctor's checks and repairs.

    blocks:   verified byte by byte
    damaged:  keys of blocks that were dropped; they are computed again on first use
    missing:  chunks whose block was not stored; also computed on first use. This is normal if a disk budget or a time
              to live evicts blocks
    orphans:  keys of blocks that no chunk refers to; deleted
    newer:    keys of blocks that a newer version wrote; left alone
    leftovers: temporary files of killed writers; removed
    index:    "sound", "absent" (nothing to search), or why it was rebuilt
    expired:  keys of blocks whose time to live was over; dropped
    gives_up: whether the store's disk tier may evict blocks
    advice:   about the store's dtype on this machine; None: no advice
    """

    blocks: int
    damaged: list[str]
    missing: list[str]
    orphans: list[str]
    newer: list[str]
    leftovers: int
    index: str
    expired: list[str] = field(default_factory=list)
    gives_up: bool = False
    advice: str | None = None

    @property
    def sound(self) -> bool:
        """Return whether there was nothing to repair."""
        missing = self.missing and not self.gives_up
        repaired = self.damaged or missing or self.orphans or self.leftovers
        return not repaired and self.index in ("sound", "absent")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}


def doctor(store: StoreParts, *, index_kind: str = "flat", timeout_s: float = 30.0) -> DoctorReport:
    """Verify every block and the index; drop damaged and unreferenced blocks, and rebuild the index.

    Everything that is dropped can be computed again: chunks keep their text, and a dropped block is made on first use.
    Raises StoreBusyError, StoreReadOnlyError, StoreFullError.
    """
    with store.layout.writer(timeout_s):
        collect_garbage(store.documents, store.kv)
        expired = store.kv.expire()
        referenced = store.documents.handles()
        damaged, newer, checked = _verify_blocks(store)
        orphans = [key for key in list(store.kv.keys()) if key not in referenced and key not in newer]
        for key in orphans:
            store.kv.delete(key)
        missing = _forget_missing(store)
        leftovers = store.kv.sweep(0.0)
        index = _check_index(store, index_kind)
    advice = advice_on(store.documents.properties().get("model_dtype"))
    return DoctorReport(checked, damaged, missing, orphans, newer, leftovers, index, expired, store.kv.gives_up, advice)


def _verify_blocks(store: StoreParts) -> tuple[list[str], list[str], int]:
    damaged, newer, checked = [], [], 0
    for key in list(store.kv.keys()):
        checked += 1
        try:
            store.kv.verify(key)
        except DamagedBlockError:
            store.kv.delete(key)
            damaged.append(key)
        except SchemaVersionError:
            newer.append(key)
        except MissingBlockError:  # deleted by a reader that found it damaged a moment ago
            continue
    return damaged, newer, checked


def _forget_missing(store: StoreParts) -> list[str]:
    """Mark chunks whose block is missing as pending; return their ids.

    All blocks are listed at once, so that an unreachable remote raises an error and does not make its blocks look
    missing.
    """
    kept = set(store.kv.keys())
    missing = [
        chunk.id
        for document in store.documents.documents()
        for chunk in store.documents.chunks_of(document.id)
        if chunk.handle is not None and chunk.handle not in kept and not store.kv.lookup([chunk.handle], "durable")
    ]
    if missing:
        store.documents.set_handles(dict.fromkeys(missing))
        collect_garbage(store.documents, store.kv)
    return missing


def _check_index(store: StoreParts, kind: str) -> str:
    bound = store.documents.properties()
    if "embedder" not in bound or not store.documents.counts().chunks:
        return "absent"
    dimension, embedder = int(str(bound["embedding_dim"])), str(bound["embedder"])
    stored = partial(store.documents.vectors_by_ids, dimension=dimension)
    if kind not in KINDS:
        table = open_table(store.documents, kind, embedder, dimension)
        table.follow(store.documents)
        if all(map(table.agrees, store.documents.all_vectors())):
            return "sound"
        table.clear()
        table.follow(store.documents)
        return OTHER_VECTORS
    reason = _index_fault(store, stored)
    if reason is None:
        return "sound"
    generation = store.documents.generation()
    index = VectorIndex(dimension, kind=kind, embedder=embedder, stored=stored, seal=store.kv.seal)
    index.follow(store.documents)
    index.generation = generation
    index.save(store.layout.index)
    return reason


def _index_fault(store: StoreParts, stored: Stored) -> str | None:
    """Return why the saved index has to be rebuilt, or None if it agrees with SQL."""
    path = store.layout.index
    if not path.exists():
        return "rebuilt: it was absent"
    try:
        index = VectorIndex.load(path, stored, store.kv.seal)
    except DamagedIndexError as error:
        return f"rebuilt: {error}"
    if index.ids != store.documents.vector_ids():
        return "rebuilt: it held other chunks than the documents"
    agrees = all(map(index.agrees, store.documents.all_vectors()))
    return None if agrees else OTHER_VECTORS
