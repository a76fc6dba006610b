"""Delete documents with all that was made of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ragcache.retrieval.retriever import Retriever
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore, collect_garbage


def delete_documents(
    layout: StoreLayout,
    documents: DocumentStore,
    kv: KVStore,
    retriever: Retriever | None,
    ids: Iterable[str],
    *,
    timeout_s: float = 30.0,
) -> list[str]:
    """Delete documents: text, embeddings, index entries, KV bytes in every tier. Returns the ids found.

    retriever: keeps the index; None where nothing was embedded yet

    Raises StoreBusyError, StoreReadOnlyError.
    """
    wanted = list(dict.fromkeys(ids))
    with layout.writer(timeout_s):
        if retriever is not None:
            retriever.refresh()
        gone = documents.vector_ids_of(wanted)
        deleted = documents.delete_documents(wanted)
        if retriever is not None:
            retriever.apply([], np.empty((0, retriever.index.dimension), np.float32), gone)
            # HNSW keeps removed vectors in its graph: not after a deletion that was asked for.
            retriever.index.compact()
        collect_garbage(documents, kv)
        if deleted and retriever is not None:
            retriever.save(layout.index)
    return deleted
