"""The phase before a prompt is read: embed the question, search, fetch the chunks' rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.timing import Variant
from ragcache.retrieval.embedder import load_embedder
from ragcache.retrieval.embedder_types import Embedder
from ragcache.retrieval.retriever import Retriever
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument
from ragcache_demo.bag_of_words import BagOfWords

QUESTION = "Which port does the server listen on when the configuration file does not say anything about it?"
CHUNKS_PER_DOCUMENT = 100


def load_named(name: str, device: str) -> Embedder:
    """Return the embedding model of this name; "words" needs no weights, as it adds up random vectors of words."""
    if name == "words":
        return BagOfWords()
    return load_embedder(name, device)


class RetrievalPhase:
    """A document store of random vectors with short texts, and its index."""

    def __init__(self, embedder: Embedder, num_chunks: int, k: int, root: Path) -> None:
        self._embedder = embedder
        self._k = k
        layout = StoreLayout(root)
        layout.create()
        self._documents = DocumentStore.open(layout.database)
        self._retriever = Retriever.open(self._documents, layout.index, embedder)
        _fill(self._documents, num_chunks, embedder.dimension)

    def variants(self) -> list[Variant]:
        return [Variant("retrieve: embed the question", self._embed), Variant("retrieve: in all", self._retrieve)]

    def _embed(self) -> object:
        return self._embedder.embed_query(QUESTION)

    def _retrieve(self) -> object:
        return self._retriever.retrieve(QUESTION, self._k)

    def close(self) -> None:
        self._documents.close()


def _fill(documents: DocumentStore, num_chunks: int, dimension: int) -> None:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((num_chunks, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for start in range(0, num_chunks, CHUNKS_PER_DOCUMENT):
        ranks = range(start, min(start + CHUNKS_PER_DOCUMENT, num_chunks))
        chunks = [NewChunk(f"{rank}", f"Passage {rank}.\n", [rank % 97] * 500, vectors[rank]) for rank in ranks]
        documents.replace_document(NewDocument(f"document {start}"), chunks)
