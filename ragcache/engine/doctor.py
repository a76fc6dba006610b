"""Checks and repairs a store. It needs no models, unless blocks are to be computed anew."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from random import sample
from typing import TYPE_CHECKING, Any

from ragcache import errors
from ragcache.codecs.block_file import codec_of
from ragcache.engine.store_config import StoreParts
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import torch
from ragcache.models.machine import advice_on
from ragcache.retrieval.open_index import open_table
from ragcache.retrieval.vector_index import KINDS, VectorIndex
from ragcache.store.kv_store import collect_garbage

if TYPE_CHECKING:
    from ragcache.ingest.encoder import ModelEncoder

log = logging.getLogger(__name__)
OTHER_VECTORS = "rebuilt: it held other vectors than the documents"


@dataclass
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
    recomputed: how many blocks were computed anew and compared
    different: keys of those that held other numbers; dropped
    advice:   about the store's dtype on this machine; None: no advice
    """

    blocks: int = 0
    damaged: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    newer: list[str] = field(default_factory=list)
    leftovers: int = 0
    index: str = "absent"
    expired: list[str] = field(default_factory=list)
    gives_up: bool = False
    recomputed: int = 0
    different: list[str] = field(default_factory=list)
    advice: str | None = None

    @property
    def sound(self) -> bool:
        """Return whether there was nothing to repair."""
        missing = self.missing and not self.gives_up
        repaired = self.damaged or self.different or missing or self.orphans or self.leftovers
        return not repaired and self.index in ("sound", "absent")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}


def doctor(
    store: StoreParts,
    *,
    index_kind: str = "flat",
    timeout_s: float = 30.0,
    recompute: int = 0,
    encoder: ModelEncoder | None = None,
) -> DoctorReport:
    """Verify every block and the index; drop damaged and unreferenced blocks, and rebuild the index.

    recompute: how many blocks, chosen at random, `encoder` computes anew to compare them; numbers may differ by the
               codec's error bound and by rounding

    Everything that is dropped can be computed again: chunks keep their text, and a dropped block is made on first use.
    Raises StoreBusyError, StoreReadOnlyError, StoreFullError; ConfigError if there is no encoder for `recompute`.
    """
    if recompute and (encoder is None or not encoder.recipe.is_dense):
        raise errors.ConfigError(
            "recompute compares whole KV with the model's: open the store with its models (RagCache.open), and "
            "a store that keeps all of its KV",
            "recompute",
        )
    report = DoctorReport(gives_up=store.kv.gives_up)
    report.advice = advice_on(store.documents.properties().get("model_dtype"))
    with store.layout.writer(timeout_s):
        collect_garbage(store.documents, store.kv)
        report.expired = store.kv.expire()
        referenced = store.documents.handles()
        _verify_blocks(store, report)
        if encoder is not None:
            _compare(store, encoder, recompute, report)
        report.orphans = [key for key in list(store.kv.keys()) if key not in referenced and key not in report.newer]
        for key in report.orphans:
            store.kv.delete(key)
        report.missing = _forget_missing(store)
        report.leftovers = store.kv.sweep(0.0)
        report.index = _check_index(store, index_kind)
    return report


def _verify_blocks(store: StoreParts, report: DoctorReport) -> None:
    for key in list(store.kv.keys()):
        report.blocks += 1
        try:
            store.kv.verify(key)
        except errors.DamagedBlockError:
            store.kv.delete(key)
            report.damaged.append(key)
        except errors.SchemaVersionError:
            report.newer.append(key)
        except errors.MissingBlockError:  # deleted by a reader that found it damaged a moment ago
            continue


def _compare(store: StoreParts, encoder: ModelEncoder, count: int, report: DoctorReport) -> None:
    """Compute the blocks of `count` chunks anew, chosen at random, and drop stored blocks that hold other numbers."""
    chunks = [chunk for one in store.documents.documents() for chunk in store.documents.chunks_of(one.id)]
    for chunk in encoder.with_neighbours(sample(chunks, len(chunks)) if count else []):
        key = encoder.key(chunk.token_ids, chunk.neighbours)
        stored = store.kv.read(key) if chunk.handle == key else None  # any other block was made under other options
        if stored is None:
            continue
        report.recomputed += 1
        (block,) = encoder.encode([chunk.token_ids], [chunk.neighbours])
        if not _agree(stored, block):
            log.warning(
                "block %s does not hold the KV of chunk %s; dropped, and computed again on first use", key, chunk.id
            )
            store.kv.delete(key)
            report.different.append(key)
        if report.recomputed == count:
            return


def _agree(stored: KVBlock, block: KVBlock) -> bool:
    """Return whether a stored block equals a block that was computed anew.

    Numbers may differ by the codec's error bound and by rounding, which depends on the size of the batch.
    """
    if (stored.layers, stored.num_tokens) != (block.layers, block.num_tokens):
        return False
    bound = codec_of(stored).error_bound(block)
    rounding = torch.finfo(block.dtype).eps ** 0.5
    for layer in range(block.num_layers):
        for one, other in (
            (stored.layer_keys(layer), block.layer_keys(layer)),
            (stored.layer_values(layer), block.layer_values(layer)),
        ):
            own = other.float().cpu()
            if own.numel() and bool((one.float().cpu() - own).abs().max() > bound + rounding * own.abs().max()):
                return False
    return True


def _forget_missing(store: StoreParts) -> list[str]:
    """Mark chunks whose block is missing as pending; return their ids.

    All blocks are listed at once, so that an unreachable remote raises an error and does not make its blocks look
    missing.
    """
    stored = set(store.kv.keys())
    missing = {
        chunk.vector_id: chunk.id
        for document in store.documents.documents()
        for chunk in store.documents.chunks_of(document.id, document.collection)
        if chunk.handle is not None and chunk.handle not in stored and not store.kv.lookup([chunk.handle], "durable")
    }
    if missing:
        store.documents.set_handles(dict.fromkeys(missing))
        collect_garbage(store.documents, store.kv)
    return list(missing.values())


def _check_index(store: StoreParts, kind: str) -> str:
    bound = store.documents.properties()
    if "embedder" not in bound or not store.documents.counts().chunks:
        return "absent"
    dimension, embedder = int(str(bound["embedding_dim"])), str(bound["embedder"])
    if kind not in KINDS:
        table = open_table(store.documents, kind, embedder, dimension)
        table.follow(store.documents)
        if all(map(table.agrees, store.documents.all_vectors())):
            return "sound"
        table.clear()
        table.follow(store.documents)
        return OTHER_VECTORS
    reason = _index_fault(store)
    if reason is None:
        return "sound"
    generation = store.documents.generation()
    index = VectorIndex(dimension, kind=kind, embedder=embedder, seal=store.kv.seal)
    index.follow(store.documents)
    index.generation = generation
    index.save(store.layout.index)
    return reason


def _index_fault(store: StoreParts) -> str | None:
    """Return why the saved index has to be rebuilt, or None if it agrees with SQL."""
    path = store.layout.index
    if not path.exists():
        return "rebuilt: it was absent"
    try:
        index = VectorIndex.load(path, store.kv.seal)
    except errors.DamagedIndexError as error:
        return f"rebuilt: {error}"
    if index.ids != store.documents.vector_ids():
        return "rebuilt: it held other chunks than the documents"
    agrees = all(map(index.agrees, store.documents.all_vectors()))
    return None if agrees else OTHER_VECTORS
