"""The basis of a store's codec, made from a sample of the first passages that are ingested."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache.codecs.basis import fit_basis
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.models.encode import plan_batches
from ragcache.store.codec_basis import hold_basis, known_basis
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore

SAMPLE_TOKENS = 8192


def calibrate(documents: DocumentStore, kv: KVStore, encoder: ModelEncoder, chunks: Sequence[Sequence[int]]) -> None:
    """Give the store's codec its basis: one that another process has made meanwhile, or one of these chunks' KV.

    Raises BasisError when they have too few tokens, and what `KeptBasis.add` and `IngestRun` raise.
    """
    name = known_basis(documents)
    if name is not None:
        kv.basis.use(name)
        return
    name = kv.basis.add(fit_basis(_encode(encoder, _sample(chunks))))
    hold_basis(documents, name)


def _sample(chunks: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Chunks spread over all of them, of about SAMPLE_TOKENS."""
    every = max(1, sum(map(len, chunks)) // SAMPLE_TOKENS)
    return list(chunks[::every])


def _encode(encoder: ModelEncoder, chunks: Sequence[Sequence[int]]) -> list[KVBlock]:
    found: list[KVBlock] = []
    for batch in plan_batches(list(map(len, chunks)), encoder.batch_tokens):
        found += encoder.encode_limited([chunks[rank] for rank in batch])
    return found
