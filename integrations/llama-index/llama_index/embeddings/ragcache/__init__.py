"""A ragcache store's embedding model for LlamaIndex."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import PrivateAttr

import ragcache as rc
from ragcache.errors import ConfigError

__all__ = ["RagCacheEmbedding"]

DEFAULT_BATCH = 256


class RagCacheEmbedding(BaseEmbedding):
    """The embedding model of an open store, shared with it: the same vectors, and weights loaded once.

    For `VectorStoreIndex(..., embed_model=...)` and pipelines that write to a RagCacheVectorStore.
    """

    _kb: rc.RagCache = PrivateAttr()

    def __init__(self, kb: rc.RagCache | str | Path, *, embed_batch_size: int = DEFAULT_BATCH, **more: Any) -> None:
        opened = rc.open_shared(kb)
        super().__init__(model_name=opened.embedder.name, embed_batch_size=embed_batch_size, **more)
        self._kb = opened

    @classmethod
    def class_name(cls) -> str:
        return "RagCacheEmbedding"

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "the store's embedding model cannot be copied to another process; run the pipeline with num_workers=None "
            "(texts are embedded in batches there)"
        )

    def _get_query_embedding(self, query: str) -> Embedding:
        vector: Embedding = self._kb.embedder.embed_query(query).tolist()
        return vector

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await asyncio.to_thread(self._get_text_embedding, text)

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        vectors: list[Embedding] = self._kb.embedder.embed(texts).tolist()
        return vectors

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
