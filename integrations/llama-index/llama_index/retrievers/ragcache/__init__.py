"""Passages of a ragcache store as LlamaIndex nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import numpy as np
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

import ragcache as rc
from llama_index.vector_stores.ragcache.adding import check_dimension
from llama_index.vector_stores.ragcache.filters import Filter, to_filter
from llama_index.vector_stores.ragcache.nodes import to_scored_node

__all__ = ["RagCacheRetriever"]

DEFAULT_K = 5


class RagCacheRetriever(BaseRetriever):
    """A retriever of a store's passages nearest to a question, as nodes with the passages' ids.
    `metadata["ragcache_handle"]` names the KV block, and is hidden from the language model and the embedder.
    """

    def __init__(
        self,
        kb: rc.RagCache | str | Path,
        *,
        k: int = DEFAULT_K,
        collection: str | None = None,
        search: Literal["vector", "text", "hybrid"] = "vector",
        filters: MetadataFilters | Filter | None = None,
        score_threshold: float | None = None,
        mmr_lambda: float | None = None,
        fetch_k: int | None = None,
        rerank: bool | None = None,
        callback_manager: CallbackManager | None = None,
        object_map: dict[str, Any] | None = None,
        objects: list[IndexNode] | None = None,
        verbose: bool = False,
    ) -> None:
        """Make a retriever.

        kb: an open store, or the path of a store (`rc.open_shared`)
        k:               number of passages
        collection:      search only this collection of the store; None: all that kb shows
        search:          "vector", "text" (BM25) or "hybrid" (both rankings fused)
        filters:         LlamaIndex's metadata filters, or a ragcache filter
        score_threshold: leave out passages with a lower inner product
        mmr_lambda:      choose for diversity too: 1 is the plain ranking, 0 diversity only
        fetch_k:         number of candidates for mmr_lambda or the reranker; None: 5 * k
        rerank:          whether to order them by the reranker that kb was opened with; None: if it has one and
                         mmr_lambda is None

        Raises FilterError for an operator that the store does not have.
        """
        super().__init__(callback_manager=callback_manager, object_map=object_map, objects=objects, verbose=verbose)
        self._kb = rc.open_shared(kb, collection=collection)
        self._k = k
        self._options: dict[str, Any] = {
            "search": search,
            "filter": to_filter(filters),
            "score_threshold": score_threshold,
            "mmr_lambda": mmr_lambda,
            "fetch_k": fetch_k,
            "rerank": rerank,
        }

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the passages as nodes. Raises PromptError, ConfigError, FilterError."""
        hits = self._kb.retrieve(self._question(query_bundle), self._k, **self._options)
        return [to_scored_node(hit) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        question = await asyncio.to_thread(self._question, query_bundle)
        hits = await self._kb.aretrieve(question, self._k, **self._options)
        return [to_scored_node(hit) for hit in hits]

    def _question(self, query: QueryBundle) -> Any:
        """Return a text for the store to embed, or a vector: the query's own, or the mean of several texts' vectors.

        A keyword search and a reranker need the text.
        """
        if self._options["search"] != "vector" or self._options["rerank"]:
            return query.query_str
        if query.embedding is not None:
            check_dimension(self._kb, query.embedding, "the query embedding")
            return np.asarray(query.embedding, np.float32)
        if query.custom_embedding_strs:
            vectors = [self._kb.embedder.embed_query(text) for text in query.custom_embedding_strs]
            return np.mean(vectors, axis=0, dtype=np.float32)
        return query.query_str
