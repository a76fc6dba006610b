"""Delete documents and everything derived from them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ragcache.retrieval.retriever import Retriever
from ragcache.store.collections import OTHERS, may
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore, collect_garbage
from ragcache.store.records import Chunk
from ragcache.store.rows import parts_of


def unlearn(documents: DocumentStore, kv: KVStore, chunks: Iterable[Chunk]) -> None:
    """Delete the passages learnt from prompts that quote these chunks, with their KV.

    Chunks of collections that the view of `documents` may not write are passed over. Raises StoreReadOnlyError,
    StoreFullError, StoreBusyError.
    """
    own = (chunk for chunk in chunks if may(documents.view.writes, chunk.collection))
    kv.unlearn(((chunk.collection, OTHERS), chunk.token_ids) for chunk in own)


def delete_documents(
    layout: StoreLayout,
    documents: DocumentStore,
    kv: KVStore,
    retriever: Retriever | None,
    ids: Iterable[str],
    *,
    timeout_s: float = 30.0,
) -> list[str]:
    """Delete documents: text, embeddings, index entries, and KV bytes in every tier. Return the ids that were found.

    retriever: holds the index; None if nothing was embedded yet
    timeout_s: seconds to wait for another writer

    Raises StoreBusyError, StoreReadOnlyError, StoreFullError.
    """
    document_ids = list(dict.fromkeys(ids))
    with layout.writer(timeout_s):
        if retriever is not None:
            retriever.refresh()
        gone = documents.vector_ids_of(document_ids)
        for part in parts_of(document_ids):  # first: a kill in between must leave no passage that quotes deleted text
            unlearn(documents, kv, (chunk for id in part for chunk in documents.chunks_of(id)))
        deleted = documents.delete_documents(document_ids)
        if retriever is not None:
            retriever.apply([], np.empty((0, retriever.index.dimension), np.float32), gone)
            # HNSW keeps removed vectors in its graph, but a deletion that a user requests must erase them.
            retriever.index.compact()
        collect_garbage(documents, kv)
        if deleted and retriever is not None:
            retriever.save(layout.index)
    return deleted
