"""The basis of a store's codec, computed from a sample of the first passages ingested."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.models.batches import plan_batches
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore

SAMPLE_TOKENS = 8192


def calibrate(documents: DocumentStore, kv: KVStore, encoder: ModelEncoder, chunks: Sequence[Sequence[int]]) -> None:
    """Give the store's codec its basis: the basis that another process has made meanwhile, or a fit to the chunks' KV.

    chunks: token ids of each chunk; about SAMPLE_TOKENS tokens are sampled

    Raises BasisError if the chunks have too few tokens, and the errors of `KVStore.add_basis` and
    `ModelEncoder.encode`.
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
