"""A ragcache store as a LlamaIndex vector store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import types

import ragcache as rc
from llama_index.vector_stores.ragcache.adding import check_dimension, raise_failure, to_documents
from llama_index.vector_stores.ragcache.filters import Filter, all_of, to_filter
from llama_index.vector_stores.ragcache.nodes import HANDLE_KEY, REF_FIELD, is_node, to_node, to_scored_node
from ragcache.errors import ConfigError

__all__ = ["HANDLE_KEY", "RagCacheVectorStore"]

DEFAULT_MMR = 0.5
SEARCHES = {types.VectorStoreQueryMode.HYBRID: "hybrid", types.VectorStoreQueryMode.TEXT_SEARCH: "text"}


class RagCacheVectorStore(types.BasePydanticVectorStore):
    """A vector store that keeps nodes in a ragcache store: text, metadata, vector and KV block.

    The store embeds passages itself, with the model it was made with; embeddings of nodes are checked and then ignored.
    Everything is on disk when `add` and `delete` return, so there is nothing to persist.

        kb:        an open store, which the caller closes, or the path of a store (`rc.open_shared`)
        collection: the collection that nodes are added to and found in; None: nodes are added to `default`, and found
                   in all collections that kb shows
        kv:        "eager" computes KV blocks when nodes are added, "lazy" at their first use
        timeout_s: how long to wait for another process that is writing
    """

    stores_text: bool = True
    is_embedding_query: bool = True
    kv: str = "eager"
    timeout_s: float = 30.0
    _kb: rc.RagCache = PrivateAttr()

    def __init__(
        self,
        kb: rc.RagCache | str | Path,
        *,
        collection: str | None = None,
        kv: str = "eager",
        timeout_s: float = 30.0,
        **more: Any,
    ) -> None:
        super().__init__(**{"kv": kv, "timeout_s": timeout_s, **more})
        self._kb = rc.open_shared(kb, collection=collection)

    @classmethod
    def from_path(cls, path: str | Path, *, kv: str = "eager", timeout_s: float = 30.0, **options: Any) -> Self:
        """Open the store at `path`, or make a new store there. The caller closes it: `store.client.close()`.

        options: see `ragcache.RagCache.open`
        """
        return cls(rc.RagCache.open(path, **options), kv=kv, timeout_s=timeout_s)

    @classmethod
    def class_name(cls) -> str:
        return "RagCacheVectorStore"

    @property
    def client(self) -> rc.RagCache:
        return self._kb

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("an open store cannot be pickled; open it where it is used: RagCacheVectorStore.from_path")

    # Changes

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Store nodes, replacing those with the same ids, and return their ids.

        Raises MetadataError, IngestError, EmbedderMismatchError (nothing is stored then), ContextTooLongError (a node
        that does not fit the model; the others are stored), StoreBusyError.
        """
        documents = to_documents(self._kb, nodes)
        raise_failure(self._kb.ingest(documents, split=False, kv=self.kv, timeout_s=self.timeout_s))
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        documents = await asyncio.to_thread(to_documents, self._kb, nodes)
        raise_failure(await self._kb.aingest(documents, split=False, kv=self.kv, timeout_s=self.timeout_s))
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete all nodes of a document: text, embedding, KV bytes.

        ref_doc_id: LlamaIndex's id of the document, or the store's id of a document that was ingested whole
        """
        found = self._kb.documents({REF_FIELD: ref_doc_id})
        ids = [document.id for document in found if is_node(document.id, document.metadata)]
        whole = self._kb.document(ref_doc_id)
        if whole is not None and not is_node(whole.id, whole.metadata):
            ids.append(ref_doc_id)
        self._delete(ids)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: types.MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete the nodes with these ids, or those that pass the filters, or, given both, those that match both.

        Raises ConfigError if neither is given (to delete all, use `clear`), and for a passage of a document that was
        ingested whole.
        """
        if node_ids is None and filters is None:
            raise ConfigError("delete_nodes was given neither node_ids nor filters; to delete everything, use clear()")
        chunks = self._chunks(node_ids, filters)
        parts = [chunk for chunk in chunks if chunk.id != chunk.document_id]
        if parts:
            raise ConfigError(
                f"{parts[0].id!r} is a passage of the document {parts[0].document_id!r}, which was ingested whole; "
                f"delete that: delete({parts[0].document_id!r})"
            )
        self._delete([chunk.document_id for chunk in chunks])

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: types.MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    def clear(self) -> None:
        """Delete everything in the store, including documents ingested without LlamaIndex."""
        self._delete([document.id for document in self._kb.documents()])

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Do nothing: the store is on disk, at its own path. `from_path` opens it again."""

    # Questions

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: types.MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return the nodes with these ids that pass the filters, in the ids' order; without ids, all that pass.
        Unknown ids are left out.
        """
        return [to_node(chunk) for chunk in self._chunks(node_ids, filters)]

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: types.MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    def query(self, query: types.VectorStoreQuery, **kwargs: Any) -> types.VectorStoreQueryResult:
        """Return the nearest nodes by inner product, with their handles, in the modes "default", "mmr", "hybrid" and
        "text_search" (the last two need a query_str).

        kwargs: mmr_threshold (1: nearness only, 0: diversity only), mmr_prefetch_factor or mmr_prefetch_k

        Raises ConfigError (another mode), FilterError, EmbedderMismatchError.
        """
        return _result(self._kb.retrieve(**self._search(query, kwargs)))

    async def aquery(self, query: types.VectorStoreQuery, **kwargs: Any) -> types.VectorStoreQueryResult:
        return _result(await self._kb.aretrieve(**self._search(query, kwargs)))

    def _search(self, query: types.VectorStoreQuery, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `RagCache.retrieve`."""
        options: dict[str, Any] = {"k": query.similarity_top_k, "filter": _wanted(query)}
        if query.mode == types.VectorStoreQueryMode.MMR:
            options |= _variety(query, kwargs)
        elif query.mode in SEARCHES:
            if query.query_str is None:
                raise ConfigError(f"query mode {query.mode.value!r} searches for words; give the query a query_str")
            return {**options, "question": query.query_str, "search": SEARCHES[query.mode]}
        elif query.mode != types.VectorStoreQueryMode.DEFAULT:
            modes = "'default', 'mmr', 'hybrid' or 'text_search'"
            raise ConfigError(f"query mode {query.mode.value!r} is not supported; use {modes}")
        if query.query_embedding is None:
            if query.query_str is None:
                raise ConfigError("the query has neither query_embedding nor query_str; give one of them")
            return {**options, "question": query.query_str}
        check_dimension(self._kb, query.query_embedding, "the query embedding")
        return {**options, "question": np.asarray(query.query_embedding, np.float32)}

    def _chunks(self, node_ids: list[str] | None, filters: types.MetadataFilters | None) -> Sequence[rc.Chunk]:
        return self._kb.chunks(node_ids, filter=to_filter(filters))

    def _delete(self, ids: list[str]) -> None:
        if ids:
            self._kb.delete(ids, timeout_s=self.timeout_s)


def _wanted(query: types.VectorStoreQuery) -> Filter | None:
    documents = to_filter({"document_id": {"$in": query.doc_ids}}) if query.doc_ids else None
    nodes = {"chunk_id": {"$in": query.node_ids}} if query.node_ids else None
    return all_of(to_filter(query.filters), documents, nodes)


def _variety(query: types.VectorStoreQuery, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    given = query.mmr_threshold if query.mmr_threshold is not None else kwargs.get("mmr_threshold")
    options: dict[str, Any] = {"mmr_lambda": DEFAULT_MMR if given is None else float(given)}
    if "mmr_prefetch_k" in kwargs and "mmr_prefetch_factor" in kwargs:
        raise ConfigError("mmr_prefetch_k and mmr_prefetch_factor say the same in two ways; give one of them")
    if "mmr_prefetch_k" in kwargs:
        options["fetch_k"] = int(kwargs["mmr_prefetch_k"])
    elif "mmr_prefetch_factor" in kwargs:
        options["fetch_k"] = int(query.similarity_top_k * float(kwargs["mmr_prefetch_factor"]))
    return options


def _result(hits: Sequence[rc.Hit]) -> types.VectorStoreQueryResult:
    nodes = [to_scored_node(hit).node for hit in hits]
    return types.VectorStoreQueryResult(
        nodes=nodes, similarities=[hit.score for hit in hits], ids=[node.node_id for node in nodes]
    )
