"""A ragcache store as a LangChain vector store."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from numpy.typing import NDArray

import ragcache as rc
from langchain_ragcache.documents import to_document, to_passage
from langchain_ragcache.embedder import LangChainEmbedder
from langchain_ragcache.embeddings import RagCacheEmbeddings
from langchain_ragcache.opening import open_kb
from langchain_ragcache.options import refuse_unknown
from langchain_ragcache.search import Scored, Search, mmr
from ragcache.errors import ConfigError, NoSuchDocumentError

# `langchain_core.indexing.index` passes batch_size, which has no effect: the store makes batches by tokens.
ADD_OPTIONS = ("ids", "kv", "timeout_s", "batch_size")


class RagCacheVectorStore(VectorStore):
    """A vector store of documents, their embeddings and their KV. Each document is one passage, kept exactly as it is.

    kb:        an open `rc.RagCache`, or the path of a store, which is opened; None: the store named by RAGCACHE_STORE
    embedding: LangChain embeddings (or an `rc.Embedder`) to open the path with; None: the store's own
    options:   of `rc.RagCache.open`, for a path

    `add_documents` computes the KV of every document as well as its embedding. A search returns documents as they were
    added; with `handles=True`, and from `as_retriever()`, their metadata name their KV under "ragcache_handle", which
    is never stored. Every search takes filter=, score_threshold= and handles=, and refuses unknown options.

    Scores are inner products, which are cosines if the embedder normalises. `close()` closes the store.
    """

    def __init__(
        self,
        kb: rc.RagCache | str | Path | None = None,
        embedding: Embeddings | rc.Embedder | None = None,
        **options: Any,
    ) -> None:
        """Open the store, or one collection of it (`collection=`). Raises ConfigError if the store is open with another
        embedding, and the errors of `rc.RagCache.open`.
        """
        embedder = None if embedding is None else _embedder(embedding)
        if isinstance(kb, rc.RagCache) and embedder is kb.embedder:
            embedder = None
        self.kb = open_kb(kb, embedder=embedder, **options)

    @property
    def embeddings(self) -> Embeddings:
        """Return the embeddings that the store was opened with, or its own."""
        own = self.kb.embedder
        return own.embeddings if isinstance(own, LangChainEmbedder) else RagCacheEmbeddings(self.kb)

    # Construction

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | rc.Embedder | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        kb: rc.RagCache | str | Path | None = None,
        **options: Any,
    ) -> Self:
        """Open a store (see the class) and add these texts."""
        store = cls(kb, embedding, **options)
        try:
            store.add_texts(texts, metadatas, ids=ids)
        except BaseException:
            if store.kb is not kb:
                store.close()
            raise
        return store

    @classmethod
    def from_documents(
        cls, documents: list[Document], embedding: Embeddings | rc.Embedder | None = None, **kwargs: Any
    ) -> Self:
        """Open a store (see the class) and add these documents."""
        return super().from_documents(documents, embedding, **kwargs)  # type: ignore[arg-type]

    # Adding and deleting

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Store documents by id, replacing any with the same ids, and return the ids in order.

        ids: instead of the documents' own. A document without id gets a new id, so adding it twice stores it twice. Of
             several documents with the same id the last is stored
        kv:  "eager" computes KV now, "lazy" at the first use
        timeout_s: how long to wait for another writer

        Raises the errors of `rc.RagCache.ingest`. If a document cannot be stored, the others are stored, and then its
        IngestError is raised (MetadataError: metadata that is not JSON), with a note of the missing ids.
        """
        ids = _ids(documents, kwargs)
        report = self.kb.ingest(_passages(documents, ids), split=False, **_ingest_options(kwargs))
        return _stored(ids, report)

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Run `add_documents` without blocking the event loop."""
        ids = _ids(documents, kwargs)
        report = await self.kb.aingest(_passages(documents, ids), split=False, **_ingest_options(kwargs))
        return _stored(ids, report)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents: text, embedding, KV bytes in every tier. Unknown ids are ignored. ids: None deletes all
        documents.

        Raises NoSuchDocumentError for the id of a passage that was cut out of a larger document: delete that document.
        """
        refuse_unknown("delete", kwargs, ["timeout_s"])
        self.kb.delete(self._deletable(ids), **kwargs)
        return True

    def _deletable(self, ids: list[str] | None) -> list[str]:
        if ids is None:
            return [document.id for document in self.kb.documents()]
        wanted = set(ids)
        for chunk in self.kb.chunks(ids):
            if chunk.document_id not in wanted and self.kb.document(chunk.id) is None:
                raise NoSuchDocumentError(
                    f"{chunk.id} is a passage of the document {chunk.document_id!r}; delete that document"
                )
        return list(ids)

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; unknown ids are left out."""
        return [to_document(chunk) for chunk in self.kb.chunks(ids)]

    # Searching

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the k documents nearest to the question, best first. Raises FilterError, ConfigError."""
        search = Search.of(kwargs)
        return search.documents(self.kb.retrieve(query, k, **search.retrieval()))

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> Scored:
        """Return documents with inner products; higher is nearer."""
        search = Search.of(kwargs)
        return search.scored(self.kb.retrieve(query, k, **search.retrieval()))

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        search = Search.of(kwargs)
        return search.documents(self.kb.retrieve(self._vector(embedding), k, **search.retrieval()))

    def _similarity_search_with_relevance_scores(self, query: str, k: int = 4, **kwargs: Any) -> Scored:
        """Return documents with the cosine of question and document, or 0 if it is negative. LangChain applies
        score_threshold to it.
        """
        search = Search.of(kwargs)
        question = self.kb.embedder.embed_query(query)
        return search.relevant(self.kb.retrieve(question, k, **search.retrieval()), self.kb, question)

    async def _asimilarity_search_with_relevance_scores(self, query: str, k: int = 4, **kwargs: Any) -> Scored:
        return await run_in_executor(None, self._similarity_search_with_relevance_scores, query, k, **kwargs)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return k of the fetch_k nearest documents by maximal marginal relevance.

        lambda_mult: 1 is plain ranking, 0 the most diverse
        """
        search = Search.of(kwargs)
        return search.documents(self.kb.retrieve(query, k, **mmr(search, k, fetch_k, lambda_mult)))

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        search = Search.of(kwargs)
        vector = self._vector(embedding)
        return search.documents(self.kb.retrieve(vector, k, **mmr(search, k, fetch_k, lambda_mult)))

    def _vector(self, embedding: Sequence[float]) -> NDArray[np.float32]:
        """Return a question's vector, scaled as the store's embedder would scale it."""
        vector = np.asarray(embedding, dtype=np.float32)
        own = self.kb.embedder
        return own.scaled(vector) if isinstance(own, LangChainEmbedder) else vector

    def as_retriever(self, **kwargs: Any) -> VectorStoreRetriever:
        """Return LangChain's own retriever over this store; its documents carry their handles."""
        kwargs["search_kwargs"] = {"handles": True, **kwargs.get("search_kwargs", {})}
        return super().as_retriever(**kwargs)

    # Closing

    def close(self) -> None:
        """Close the store `kb`, for every component that shares it."""
        self.kb.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _embedder(embedding: Embeddings | rc.Embedder) -> rc.Embedder:
    if isinstance(embedding, RagCacheEmbeddings):
        return embedding.embedder
    return LangChainEmbedder(embedding) if isinstance(embedding, Embeddings) else embedding


def _ids(documents: Sequence[Document], options: dict[str, Any]) -> list[str]:
    """Return the documents' ids. Raises ConfigError for unknown options, or unless each is a string."""
    refuse_unknown("add_documents", options, ADD_OPTIONS)
    given = options.get("ids") or [None] * len(documents)
    if isinstance(given, str) or len(given) != len(documents):
        raise ConfigError(f"ids: {len(documents)} documents need one id each, or None")
    ids = [id or document.id or str(uuid.uuid4()) for id, document in zip(given, documents, strict=True)]
    if wrong := [id for id in ids if not isinstance(id, str)]:
        raise ConfigError(f"ids: {wrong[0]!r} is no string")
    return ids


def _passages(documents: Iterable[Document], ids: Sequence[str]) -> list[rc.Document]:
    last = dict(zip(ids, documents, strict=True))
    return [to_passage(document, id) for id, document in last.items()]


def _ingest_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("kv", "timeout_s") if name in options}


def _stored(ids: list[str], report: rc.IngestReport) -> list[str]:
    """Return the ids, or raise the first error if a document was not stored."""
    if report.failed:
        there = {*report.added, *report.updated, *report.unchanged}
        error = report.failed[0].error
        error.add_note(f"not stored: {', '.join(id for id in dict.fromkeys(ids) if id not in there)}")
        raise error
    return ids
