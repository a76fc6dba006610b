"""The basis of a store's codec, made from a sample of the first passages that are ingested."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.models.batches import plan_batches
from ragcache.retrieval.embedder import Vectors as Vectors
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore

SAMPLE_TOKENS = 8192


def calibrate(documents: DocumentStore, kv: KVStore, encoder: ModelEncoder, chunks: Sequence[Sequence[int]]) -> None:
    """Give the store's codec its basis: one that another process has made meanwhile, or one of these chunks' KV.

    Raises BasisError when they have too few tokens, and what `KVStore.add_basis` and `IngestRun` raise.
    """
    name = documents.basis
    if name is not None:
        kv.use_basis(name)
        return
    every = max(1, sum(map(len, chunks)) // SAMPLE_TOKENS)
    sample = chunks[::every]
    blocks: list[KVBlock] = []
    for batch in plan_batches(list(map(len, sample)), encoder.batch_tokens):
        blocks += encoder.encode([sample[rank] for rank in batch])
    documents.hold_basis(kv.add_basis(kv.fit_basis(blocks)))
