"""KV blocks of retrieved chunks: loaded, or computed and kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.errors import NoSuchDocumentError, StoreBusyError, StoreFullError, StoreReadOnlyError
from ragcache.ingest.encoder import BlockEncoder
from ragcache.kv.block import KVBlock
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import Chunk

log = logging.getLogger(__name__)
COMPUTED = "computed"


@dataclass(frozen=True, eq=False)
class LoadedBlocks:
    """blocks, handles and origins (tier name or "computed") in the chunks' order.

    load_s, encode_s: seconds spent reading tiers, and computing what none had
    encoded_tokens:   tokens of the blocks that were computed
    """

    blocks: list[KVBlock]
    handles: list[str]
    origins: list[str]
    load_s: float
    encode_s: float
    encoded_tokens: int


def load_or_compute(
    encoder: BlockEncoder,
    kv_store: KVStore,
    documents: DocumentStore,
    chunks: Sequence[Chunk],
    *,
    passing: bool = False,
) -> LoadedBlocks:
    """One block a chunk. What no tier holds is computed from the chunk's ids and kept: on disk for the store's own
    chunks, in this process's memory for others, which no deletion would ever find.

    passing: the encoder is not the store's own (another prefix): keep in memory only

    The name of a block follows from what it depends on, so a block made under another model, recipe or prefix is not
    found here, however it is named in the document store (law 8).
    """
    started = time.perf_counter()
    handles = [encoder.key(chunk.token_ids) for chunk in chunks]
    found = kv_store.get_many(handles)
    loaded_at = time.perf_counter()
    missing = {handle: rank for rank, handle in enumerate(handles) if found[rank] is None}
    computed: dict[str, KVBlock] = {}
    if missing:
        made = encoder.encode([chunks[rank].token_ids for rank in missing.values()])
        computed = dict(zip(missing, made, strict=True))
        for handle, block in computed.items():
            chunk = chunks[missing[handle]]
            # What is kept is read here too: with a lossy codec the first answer is then like all later ones.
            if passing or not chunk.is_stored:
                computed[handle] = kv_store.remember(handle, block)
            else:
                computed[handle] = _keep(kv_store, documents, chunk, handle, block)
    return LoadedBlocks(
        blocks=[computed[handle] if hit is None else hit.block for handle, hit in zip(handles, found, strict=True)],
        handles=handles,
        origins=[COMPUTED if hit is None else hit.tier for hit in found],
        load_s=loaded_at - started,
        encode_s=time.perf_counter() - loaded_at,
        encoded_tokens=sum(block.num_tokens for block in computed.values()),
    )


def _keep(kv_store: KVStore, documents: DocumentStore, chunk: Chunk, handle: str, block: KVBlock) -> KVBlock:
    """Store a computed block and return it as stored.

    A store that cannot take it costs the next question time, never this one its answer.
    """
    stored = block
    try:
        stored = kv_store.put(handle, block)
        if chunk.handle != handle:
            documents.set_handle(chunk.id, handle)
    except NoSuchDocumentError:
        if handle not in documents.handles():  # deleted since it was retrieved: leave no bytes behind (law 10)
            kv_store.delete(handle)
    except (StoreReadOnlyError, StoreFullError, StoreBusyError) as error:
        log.warning("the block of chunk %s is kept in memory only: %s", chunk.id, error)
        stored = kv_store.remember(handle, block)
    return stored
