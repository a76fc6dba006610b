"""A whole store around a tiny model, without an engine."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from ragcache.ingest.chunker import Chunker, ChunkerConfig
from ragcache.ingest.context_chunks import Similar
from ragcache.ingest.encoder import ModelEncoder
from ragcache.ingest.pipeline import Ingestor
from ragcache.ingest.read_limits import IngestConfig, ReadLimits
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Neighbours, Recipe
from ragcache.models.language_model import LanguageModel
from ragcache.retrieval.retriever import Retriever
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.neighbours import NeighbourChoice
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_ray.cluster import Cluster, RayConfig


class CountingEmbedder(BagOfWords):
    texts = 0

    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> np.ndarray:
        self.texts += len(texts)
        return super().embed(texts)


class DyingEmbedder(BagOfWords):
    """Takes its process with it."""

    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> np.ndarray:
        if any("poison" in text for text in texts):
            os._exit(1)
        return super().embed(texts)


class CountingEncoder(ModelEncoder):
    tokens = 0

    def encode(self, chunks: Sequence[Sequence[int]], neighbours: Sequence[Neighbours] | None = None) -> list[KVBlock]:
        self.tokens += sum(map(len, chunks))
        return super().encode(chunks, neighbours)


def chunker_of(tokenizer: object, max_tokens: int = 256, **more: int) -> Chunker:
    """Makes a chunker whose least size suits short chunks."""
    return Chunker(tokenizer, ChunkerConfig(max_tokens, **{"min_tokens": min(32, max_tokens // 4), **more}))


class Kit:
    """Everything that an ingestion touches, opened on one directory."""

    def __init__(
        self,
        root: Path,
        lm: LanguageModel,
        *,
        kind: str = "flat",
        recipe: str = "isolated",
        max_tokens: int = 64,
        reading: ReadLimits | None = None,
        neighbours: int = 0,
    ) -> None:
        self.layout = StoreLayout(root)
        self.layout.create()
        self.documents = DocumentStore.open(self.layout.database)
        self.kv = KVStore(self.layout.kv, memory_bytes=1 << 20)
        self.embedder = CountingEmbedder()
        self.retriever = Retriever.open(self.documents, self.layout.index, self.embedder, kind=kind)
        self.chunker = chunker_of(lm.tokenizer, max_tokens)
        near = Similar(self.documents, self.retriever, NeighbourChoice(neighbours)) if neighbours else None
        self.encoder = CountingEncoder(
            lm, Recipe(recipe, neighbours=neighbours), first_ids=[1, 2, 3], neighbourhood=near
        )
        config = IngestConfig(window_tokens=300, batch_tokens=128, reading=reading or ReadLimits())
        self.ingestor = Ingestor(
            self.layout, self.documents, self.kv, self.retriever, self.chunker, self.encoder, config
        )

    def close(self) -> None:
        self.ingestor.close()
        self.kv.close()
        self.documents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ids(self) -> list[str]:
        return [document.id for document in self.documents.documents()]

    def texts(self) -> dict[str, list[str]]:
        return {id: [chunk.text for chunk in self.documents.chunks_of(id)] for id in self.ids()}

    def cluster(self, actors: int = 2) -> Cluster:
        """A local Ray whose actors write to this store."""
        return Cluster(RayConfig(actors=actors), partial(KVStore, self.layout.kv, memory_bytes=0))

    def check(self) -> None:
        """Everything visible verifies: blocks against the model's shapes, the index against SQL. What is read behind
        neighbours may wait for its KV."""
        for id in self.ids():
            for chunk in self.documents.chunks_of(id):
                if chunk.handle is None and self.encoder.neighbourhood is not None:
                    continue
                assert [chunk.handle] == self.encoder.keys([chunk])
                self.kv.verify(chunk.handle)
                loaded = self.kv.get(chunk.handle)
                assert loaded is not None
                assert loaded.block.num_tokens == len(chunk.token_ids)
        with_vectors = {}
        for batch in self.documents.all_vectors():
            with_vectors.update(zip(batch.ids.tolist(), batch.vectors, strict=True))
        self.retriever.refresh()
        assert self.retriever.index.ids == frozenset(with_vectors)
        for id, vector in with_vectors.items():
            np.testing.assert_array_equal(self.retriever.index.vectors_present(np.array([id]))[1][0], vector)
