"""A transformation that computes KV blocks inside a LlamaIndex ingestion pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent

import ragcache as rc
from llama_index.ingestion.ragcache.attachment import RagCachePrecompute
from llama_index.vector_stores.ragcache.adding import raise_failure
from llama_index.vector_stores.ragcache.nodes import to_document, with_handle
from ragcache.errors import ConfigError

__all__ = ["RagCachePrecompute", "RagCacheTransform"]


class RagCacheTransform(TransformComponent):
    """A transformation that stores nodes as passages, computes their KV, and returns them with handle and embedding.

    A node that has an embedding keeps it, though the store's own index holds a vector of the store's model.

    Use it as the last step of an IngestionPipeline. With `vector_store=RagCacheVectorStore(kb)` the pipeline then finds
    the nodes in the store already: nothing is embedded or computed twice. With another vector store the nodes carry
    their handles there. A handle from the pipeline's own cache may name a block that was dropped since: handles are
    hints, checked when they are used.

        kb: an open store, or the path of a store (`rc.open_shared`)
        collection: of the store, that the nodes go to; None: `default`
        kv: "eager" computes KV blocks now, "lazy" at their first use (no handle is attached then)
        timeout_s: how long to wait for another process that is writing
    """

    kv: str = "eager"
    timeout_s: float = 30.0
    fingerprint: str = Field(description="Of the language model; makes the pipeline's cache tell models apart.")
    embedder: str = Field(description="Name of the embedding model.")
    _kb: rc.RagCache = PrivateAttr()

    def __init__(
        self, kb: rc.RagCache | str | Path, *, collection: str | None = None, kv: str = "eager", timeout_s: float = 30.0
    ) -> None:
        opened = rc.open_shared(kb, collection=collection)
        named = {"fingerprint": opened.lm.fingerprint, "embedder": opened.embedder.name}
        super().__init__(**{"kv": kv, "timeout_s": timeout_s, **named})
        self._kb = opened

    @classmethod
    def class_name(cls) -> str:
        return "RagCacheTransform"

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "an open store cannot be copied to another process, and only one process may write to it; run the pipeline "
            "with num_workers=None (passages are embedded and encoded in batches there)"
        )

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Return finished copies of the nodes; the originals are not changed, since pipelines compare their hashes.

        Raises MetadataError, IngestError, ReaderError, ContextTooLongError, StoreBusyError.
        """
        documents = [to_document(node) for node in nodes]
        raise_failure(self._kb.ingest(documents, split=False, kv=self.kv, timeout_s=self.timeout_s))
        return self._finished(nodes)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        documents = await asyncio.to_thread(lambda: [to_document(node) for node in nodes])
        raise_failure(await self._kb.aingest(documents, split=False, kv=self.kv, timeout_s=self.timeout_s))
        return await asyncio.to_thread(self._finished, nodes)

    def _finished(self, nodes: Sequence[BaseNode]) -> list[BaseNode]:
        chunks = self._kb.chunks([node.node_id for node in nodes])
        vectors = self._kb.vectors([chunk.id for chunk in chunks]).tolist()
        found = {chunk.id: (chunk.handle, vector) for chunk, vector in zip(chunks, vectors, strict=True)}
        return [_finished(node, *found.get(node.node_id, (None, None))) for node in nodes]


def _finished(node: BaseNode, handle: str | None, vector: list[float] | None) -> BaseNode:
    """Return a copy that shares no changed part. vector: used for a node without an embedding"""
    kept = vector if node.embedding is None else node.embedding
    return with_handle(node.model_copy(update={"embedding": kept}), handle)
