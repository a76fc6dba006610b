"""Pin the KV of documents and chunks, computed where it is not there yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ragcache.errors import MissingBlockError, NoSuchDocumentError, PinError
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import Chunk

if TYPE_CHECKING:  # heavy: a store without models pins too
    from ragcache.ingest.encoder import ModelEncoder


def pin(documents: DocumentStore, kv: KVStore, encoder: ModelEncoder | None, ids: Iterable[str]) -> list[str]:
    """Pin the blocks of these documents and chunks; returns their keys.

    encoder: computes what no tier has; None (a store without its models) computes nothing

    Raises NoSuchDocumentError, MissingBlockError, PinError, StoreReadOnlyError.
    """
    chunks = find_chunks(documents, ids)
    keys = _keys(chunks, encoder)
    # Pinned is wanted, however often it was retrieved.
    missing = [replace(chunk, uses_left=0) for chunk, key in zip(chunks, keys, strict=True) if key not in kv]
    if missing and encoder is not None:
        from ragcache.engine.loader import BlockLoader
        from ragcache.engine.rates import ALWAYS

        with closing(BlockLoader(kv, policy=ALWAYS)) as loader:
            loader.load(encoder, documents, missing)
        kv.flush(keys)
        if absent := [key for key in keys if key not in kv]:
            raise PinError(f"the tiers have no room for {len(keys)} blocks at once ({len(absent)} are gone already)")
    kv.pin(keys)
    return list(dict.fromkeys(keys))


def unpin(documents: DocumentStore, kv: KVStore, encoder: ModelEncoder | None, ids: Iterable[str]) -> list[str]:
    """Let go of the blocks of these documents and chunks; returns the keys that were pinned."""
    chunks = find_chunks(documents, ids)
    named = {chunk.handle for chunk in chunks if chunk.handle is not None}
    named |= set() if encoder is None else set(encoder.keys(chunks))
    pinned = sorted(named & kv.pinned)
    kv.unpin(pinned)
    return pinned


def find_chunks(documents: DocumentStore, ids: Iterable[str]) -> list[Chunk]:
    """All chunks of these documents, and these chunks. Raises NoSuchDocumentError for an id that is neither's."""
    found: list[Chunk] = []
    for id in dict.fromkeys(ids):
        chunks = documents.chunks_of(id) or documents.chunks([id])
        if not chunks and documents.document(id) is None:
            raise NoSuchDocumentError(f"{id!r}: neither a document nor a chunk has this id; `ragcache list` shows them")
        found += chunks
    return found


def _keys(chunks: Sequence[Chunk], encoder: ModelEncoder | None) -> list[str]:
    if encoder is not None:
        return encoder.keys(chunks)
    absent = next((chunk.id for chunk in chunks if chunk.handle is None), None)
    if absent is not None:
        raise MissingBlockError(f"chunk {absent!r} has no KV yet; open the store with its models to compute and pin it")
    return [chunk.handle for chunk in chunks if chunk.handle is not None]
