"""A retriever whose documents name their KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

import ragcache as rc
from langchain_ragcache.documents import to_document
from langchain_ragcache.opening import open_kb
from langchain_ragcache.options import refuse_unknown

RETRIEVAL = ("k", *rc.RetrieveOptions.__annotations__)


class RagCacheRetriever(BaseRetriever):
    """A retriever of the passages nearest to a question, as documents with their id and, if their KV is computed,
    metadata["ragcache_handle"].

    kb:     an open `rc.RagCache`, or the path of a store, which is opened; if left out, the store named by
            RAGCACHE_STORE
    collection: search only this collection of the store; None: all that kb shows
    k:      number of passages
    search: "vector", "text" (BM25) or "hybrid" (both rankings fused)
    filter: on metadata, see docs/langchain.md
    score_threshold: least score (inner product with the question)
    mmr_lambda: diversity by maximal marginal relevance: 1 is the plain ranking, 0 the most diverse; None: no MMR
    fetch_k: number of candidates for MMR or the reranker
    rerank: whether to order them by the reranker that kb was opened with; None: if it has one and MMR is off

    `invoke` takes the same options except kb. Raises FilterError, ConfigError.
    """

    kb: Annotated[rc.RagCache, BeforeValidator(open_kb)] = Field(
        default=None, validate_default=True, exclude=True, repr=False
    )
    collection: str | None = None
    k: int = Field(default=5, ge=1)
    search: Literal["vector", "text", "hybrid"] = "vector"
    filter: Mapping[str, Any] | None = None
    score_threshold: float | None = None
    mmr_lambda: float | None = Field(default=None, ge=0, le=1)
    fetch_k: int | None = None
    rerank: bool | None = None

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    @model_validator(mode="after")
    def _narrow(self) -> Self:
        self.kb = open_kb(self.kb, collection=self.collection)
        return self

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return _documents(self.kb.retrieve(query, **self._retrieval(options)))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return _documents(await self.kb.aretrieve(query, **self._retrieval(options)))

    def _retrieval(self, options: dict[str, Any]) -> dict[str, Any]:
        refuse_unknown("the retriever", options, RETRIEVAL)
        return {name: options.get(name, getattr(self, name)) for name in RETRIEVAL}

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        return LangSmithRetrieverParams(
            ls_retriever_name="ragcache",
            ls_vector_store_provider="ragcache",
            ls_embedding_provider="ragcache",
            ls_embedding_model=self.kb.embedder.name,
        )


def _documents(hits: list[rc.Hit]) -> list[Document]:
    return [to_document(hit.chunk, hit.handle) for hit in hits]
