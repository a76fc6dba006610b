"""KV blocks of retrieved chunks: loaded, or computed and kept."""

from __future__ import annotations

import logging
import time
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
from ragcache.ingest.encoder import BlockNames, ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.models.encode import plan_batches
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import Chunk

if TYPE_CHECKING:
    from ragcache.engine.loading.loader import Ahead, BlockLoader

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


class Keeper:
    """Keeps what is computed: on disk for the store's own chunks, in this process's memory for others, which no
    deletion would ever find.

    names:   of the blocks
    passing: the encoder is not the store's own (another prefix): keep in memory only
    """

    def __init__(self, kv_store: KVStore, documents: DocumentStore, names: BlockNames, *, passing: bool) -> None:
        self._kv = kv_store
        self._documents = documents
        self._names = names
        self._passing = passing

    def keep(self, chunk: Chunk, handle: str, block: KVBlock) -> KVBlock:
        """The block as it was kept: with a lossy codec the first answer is then like all later ones."""
        if self._passing or not chunk.is_stored:
            return self._kv.remember(handle, block)
        if chunk.uses_left and not self._is_hot(chunk):
            return self._kv.pass_on(handle, block, hold=False)
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
            stored = self._kv.remember(handle, block)
        return stored

    def _forget(self, handle: str) -> None:
        """The chunk, or one that it was read behind, was deleted since it was retrieved: leave no bytes of it (law 10),
        unless others have the same."""
        if handle not in self._documents.handles():
            self._kv.delete(handle)


def encode_chunks(encoder: ModelEncoder, chunks: Sequence[Chunk]) -> list[KVBlock]:
    """The blocks of chunks whose neighbours were looked up. Raises what the limit raises."""
    return encoder.encode_limited([chunk.token_ids for chunk in chunks], [chunk.neighbours for chunk in chunks])


def load_or_compute(
    encoder: ModelEncoder,
    kv_store: KVStore,
    documents: DocumentStore,
    chunks: Sequence[Chunk],
    *,
    passing: bool = False,
    loader: BlockLoader | None = None,
    ahead: Ahead | None = None,
) -> LoadedBlocks:
    """Load or compute one block a chunk. What no tier holds is computed from the chunk's ids and kept.

    passing: see Keeper
    loader:  chooses for each block between loading and computing; None loads all that some tier has
    ahead:   reads that the loader began while retrieval still ranked

    The name of a block follows from what it depends on, so a block made under another model, recipe or prefix is not
    found here, however it is named in the document store (law 8).

    Raises CancelledError and TimedOutError within `limits.limited`.
    """
    keeper = Keeper(kv_store, documents, encoder, passing=passing)
    chunks = encoder.with_neighbours(chunks)
    handles = [encoder.key(chunk.token_ids, chunk.neighbours) for chunk in chunks]
    if loader is not None:
        return loader.load(encoder, keeper, chunks, handles, ahead)
    return _load_all(encoder, keeper, kv_store, chunks, handles)


def _load_all(
    encoder: ModelEncoder, keeper: Keeper, kv_store: KVStore, chunks: Sequence[Chunk], handles: Sequence[str]
) -> LoadedBlocks:
    started = time.perf_counter()
    found = kv_store.get_many(handles)
    loaded_at = time.perf_counter()
    missing = {handle: chunks[rank] for rank, handle in enumerate(handles) if found[rank] is None}
    computed: dict[str, KVBlock] = {}
    names = list(missing)
    for batch in plan_batches([len(chunk.token_ids) for chunk in missing.values()], encoder.batch_tokens):
        members = [names[rank] for rank in batch]
        made = encode_chunks(encoder, [missing[handle] for handle in members])
        for handle, block in zip(members, made, strict=True):
            computed[handle] = keeper.keep(missing[handle], handle, block)
    return LoadedBlocks(
        blocks=[computed[handle] if hit is None else hit.block for handle, hit in zip(handles, found, strict=True)],
        handles=list(handles),
        origins=[COMPUTED if hit is None else hit.tier for hit in found],
        load_s=loaded_at - started,
        encode_s=time.perf_counter() - loaded_at,
        encoded_tokens=sum(block.num_tokens for block in computed.values()),
    )
