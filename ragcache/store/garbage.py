"""Delete the KV bytes that no chunk refers to any more."""

from __future__ import annotations

from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore


def collect_garbage(documents: DocumentStore, kv: KVStore) -> int:
    """Delete the blocks on the documents' list of garbage from every tier; returns how many.

    The list is cleared last: a kill in between loses no deletion, it is only done again. The caller holds the store's
    writer lock.
    """
    handles = documents.collectable()
    for handle in handles:
        kv.delete(handle)
    if handles:
        documents.clear_garbage(handles)
    return len(handles)
