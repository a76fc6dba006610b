"""Blocks of retrieved chunks: what a question got, and how computed ones are kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragcache.errors import (
    NoSuchDocumentError,
    StoreBusyError,
    StoreFullError,
    StoreNotFoundError,
    StoreReadOnlyError,
    StoreUnreachableError,
)
from ragcache.ingest.encoder import BlockKeys, ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import Chunk

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)
COMPUTED = "computed"
# What keeping a block may fail with that the next question, or the next day, may find mended.
NOT_KEPT = (StoreReadOnlyError, StoreFullError, StoreBusyError, StoreUnreachableError, StoreNotFoundError)


@dataclass(frozen=True, eq=False)
class LoadedBlocks:
    """The KV blocks of a question.

    blocks, handles, origins: in the chunks' order; an origin is a tier's name, or "computed"
    load_s, encode_s: seconds spent waiting for tiers, and computing; where both went on at once, the waiting counts
                      only while nothing was computed
    encoded_tokens:   tokens of the blocks that were computed
    """

    blocks: list[KVBlock]
    handles: list[str]
    origins: list[str]
    load_s: float
    encode_s: float
    encoded_tokens: int


class BlockWriter:
    """Keeps what is computed: the store's own chunks with its documents' KV, others apart, within a budget of their
    own, since no deletion would ever find them.

    names:   of the blocks
    passing: the encoder is not the store's own (another prefix): keep in memory only
    """

    def __init__(self, kv_store: KVStore, documents: DocumentStore, names: BlockKeys, *, passing: bool) -> None:
        self._kv = kv_store
        self._documents = documents
        self._names = names
        self._passing = passing

    def keep(self, chunk: Chunk, handle: str, block: KVBlock) -> KVBlock:
        """The block as it was kept: with a lossy codec the first answer is then like all later ones."""
        if self._passing:
            return self._kv.put(handle, block, "memory")
        if not chunk.is_stored:
            return self._kv.keep_foreign(handle, block, self._names.owner, chunk.token_ids)
        if chunk.uses_left and not self._is_hot(chunk):
            return self._kv.put(handle, block, "nowhere")
        return self._store(chunk, handle, block)

    def _is_hot(self, chunk: Chunk) -> bool:
        """Count the retrieval (kv="hot"); whether it was the last one without KV."""
        try:
            self._documents.count_use(chunk.id)
        except (StoreReadOnlyError, StoreFullError, StoreBusyError) as error:
            log.warning("the retrieval of chunk %s is not counted: %s", chunk.id, error)
        return chunk.uses_left == 1

    def _store(self, chunk: Chunk, handle: str, block: KVBlock) -> KVBlock:
        """A store that cannot take it costs the next question time, never this one its answer."""
        stored = block
        try:
            stored = self._kv.put(handle, block)
            if chunk.handle != handle:
                self._documents.set_handle(chunk.id, handle)
            elif not self._documents.chunks([chunk.id]):
                self._forget(handle)
            if chunk.neighbours and self._names.keys([chunk]) != [handle]:
                self._documents.set_handle(chunk.id, None)
                self._forget(handle)
        except NoSuchDocumentError:
            self._forget(handle)
        except NOT_KEPT as error:
            log.warning("the block of chunk %s is kept in memory only: %s", chunk.id, error)
            stored = self._kv.put(handle, block, "memory")
        return stored

    def _forget(self, handle: str) -> None:
        """The chunk, or one that it was read behind, was deleted since it was retrieved: leave no bytes of it (law 10),
        unless others have the same."""
        if handle not in self._documents.handles():
            self._kv.delete(handle)


def encode_chunks(encoder: ModelEncoder, chunks: Sequence[Chunk]) -> list[KVBlock]:
    """The blocks of chunks whose neighbours were looked up. Raises what the limit raises."""
    return encoder.encode_limited([chunk.token_ids for chunk in chunks], [chunk.neighbours for chunk in chunks])
