"""A user's own index, vector store or retriever whose nodes have their KV in a store of ragcache.

Only KV is kept, and what names the document of a passage: embeddings, texts and searches stay where they are. What the
model reads of a node is what LlamaIndex's synthesizers give it: its metadata above its text (`MetadataMode.LLM`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, TransformComponent
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryResult

import ragcache as rc
from llama_index.vector_stores.ragcache.nodes import bare, with_handle
from ragcache.errors import ConfigError


class RagCachePrecompute(TransformComponent):
    """Makes the KV of nodes on their way through a pipeline; nothing is embedded or stored with it.

    A step of an IngestionPipeline behind whatever cuts the nodes. They come back with their handles, where neither the
    model nor an embedder reads them; those that the model cannot read pass as they are.

        kb: an open store, or the path of one (`rc.open_shared`)
        collection: see `ragcache.RagCache.precompute`
        metadata_mode: what the model is going to read of a node
    """

    collection: str = ""
    metadata_mode: MetadataMode = MetadataMode.LLM
    fingerprint: str = Field(description="Of the language model; makes the pipeline's cache tell models apart.")
    _kb: rc.RagCache = PrivateAttr()

    def __init__(
        self, kb: rc.RagCache | str | Path, *, collection: str = "", metadata_mode: MetadataMode = MetadataMode.LLM
    ) -> None:
        opened = rc.open_shared(kb)
        named = {"collection": collection, "metadata_mode": metadata_mode, "fingerprint": opened.lm.fingerprint}
        super().__init__(**named)
        self._kb = opened

    @classmethod
    def class_name(cls) -> str:
        return "RagCachePrecompute"

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("an open store cannot be copied to another process; run the pipeline with num_workers=None")

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Copies of the nodes. Raises what `ragcache.RagCache.precompute` raises."""
        passages = [to_passage(node, self.metadata_mode) for node in nodes]
        return with_handles(nodes, self._kb.precompute(passages, collection=self.collection).handles)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        passages = [to_passage(node, self.metadata_mode) for node in nodes]
        report = await self._kb.aprecompute(passages, collection=self.collection)
        return with_handles(nodes, report.handles)


class LlamaIndexAdapter:
    """What `rc.RagCache.precompute` and `rc.attach` know of LlamaIndex."""

    def documents(self, given: Any) -> Iterable[rc.Document]:
        """Raises ConfigError for what does not say which nodes it holds."""
        if isinstance(given, NodeWithScore | BaseNode):
            return [to_passage(given.node if isinstance(given, NodeWithScore) else given)]
        found = _held(given)
        if found is None:
            raise ConfigError(
                f"a {type(given).__name__} does not say which nodes it holds; give the nodes themselves, or add them "
                "through ragcache.attach(store, kb)"
            )
        return map(to_passage, found)

    def holder(self, given: Any) -> Any:
        if isinstance(given, NodeWithScore | BaseNode):
            return None
        inner = [getattr(given, name, None) for name in ("_index", "_vector_store")]
        return next((one for one in inner if isinstance(one, BaseIndex | BasePydanticVectorStore)), given)

    def hooks(self, given: Any, attachment: rc.Attachment) -> Mapping[str, rc.Hook]:
        """metadata_mode: what the model is going to read of a node. Raises ConfigError."""
        if unknown := [name for name in attachment.options if name != "metadata_mode"]:
            raise ConfigError(f"attach takes no {', '.join(unknown)} for objects of LlamaIndex, only metadata_mode")
        link = _Link(attachment)
        tables: dict[type, dict[str, Callable[..., Any] | None]] = {
            BaseRetriever: {"_retrieve": link.retrieved},
            BaseIndex: {
                "insert_nodes": link.added,
                **dict.fromkeys(("insert", "update_ref_doc", "refresh_ref_docs")),  # call the others
                "delete_ref_doc": link.deleted,
                "delete_nodes": link.deleted,
                "as_retriever": link.attached,
            },
            BasePydanticVectorStore: {
                "add": link.added,
                "async_add": link.added,
                "delete": link.deleted,
                "delete_nodes": link.deleted,
                "clear": link.cleared,
                "query": link.queried,
            },
        }
        followed = next((table for kind, table in tables.items() if isinstance(given, kind)), None)
        if followed is None:
            raise ConfigError(f"a {type(given).__name__} cannot be attached; give a store, an index or a retriever")
        names = {f"{more}{name}": after for name, after in followed.items() for more in ("", "a")}
        twins = {"a_retrieve": "_aretrieve"}
        methods = {twins.get(name, name): rc.Hook(after, clean=clean) for name, after in names.items()}
        return {name: hook for name, hook in methods.items() if hasattr(type(given), name)}


ADAPTER = LlamaIndexAdapter()


class _Link:
    """What follows the methods of an attached object."""

    def __init__(self, attachment: rc.Attachment) -> None:
        self._attachment = attachment
        self._mode = MetadataMode(attachment.options.get("metadata_mode", MetadataMode.LLM))

    def retrieved(self, _: Any, found: Any, __: Mapping[str, Any]) -> Any:
        nodes = self._named([one.node for one in found])
        return [NodeWithScore(node=node, score=one.score) for node, one in zip(nodes, found, strict=True)]

    def queried(self, _: Any, result: VectorStoreQueryResult, __: Mapping[str, Any]) -> VectorStoreQueryResult:
        if result.nodes:
            result.nodes = self._named(list(result.nodes))
        return result

    def added(self, _: Any, result: Any, arguments: Mapping[str, Any]) -> Any:
        self._attachment.add(to_passage(node, self._mode) for node in arguments["nodes"])
        return result

    def deleted(self, given: Any, result: Any, arguments: Mapping[str, Any]) -> Any:
        ids, source = arguments.get("node_ids"), arguments.get("ref_doc_id")
        if ids or source:
            self._attachment.forget(ids or (), sources=[source] if source else ())
        else:  # by filters: what it still holds stays
            self._attachment.sync(given)
        return result

    def cleared(self, _: Any, result: Any, __: Mapping[str, Any]) -> Any:
        self._attachment.sync([])
        return result

    def attached(self, _: Any, retriever: BaseRetriever, __: Mapping[str, Any]) -> BaseRetriever:
        about = self._attachment
        own: BaseRetriever = rc.attach(
            retriever, about.kb, collection=about.collection, learn=about.learn, **about.options
        )
        return own

    def _named(self, nodes: Sequence[BaseNode]) -> list[BaseNode]:
        return with_handles(nodes, self._attachment.handles(to_passage(node, self._mode) for node in nodes))


def to_passage(node: BaseNode, mode: MetadataMode = MetadataMode.LLM) -> rc.Document:
    """What the model reads of a node, under its id and that of the document that it was cut from."""
    node = bare(node)  # modes that read all metadata would read the handle
    text = node.get_content(metadata_mode=mode)
    return rc.Document(node.node_id, text, node.metadata, source=node.ref_doc_id or "")


def with_handles(nodes: Sequence[BaseNode], handles: Sequence[str | None]) -> list[BaseNode]:
    """Return copies that name their KV."""
    return [with_handle(node, handle) for node, handle in zip(nodes, handles, strict=True)]


def clean(value: Any) -> Any:
    """Return an argument of an index's or a store's method with no handle in the nodes that it holds."""
    if isinstance(value, BaseNode):
        return bare(value)
    holds = isinstance(value, list | tuple) and value and isinstance(value[0], BaseNode)
    return [clean(one) for one in value] if holds else value


def _held(given: Any) -> Iterable[BaseNode] | None:
    """The nodes of an index, a store that gives them out, or a retriever over one of these; None: unknown."""
    if isinstance(given, BaseIndex):
        return list(given.docstore.docs.values()) or _held(getattr(given, "vector_store", None))
    if isinstance(given, BasePydanticVectorStore):
        try:
            return list(given.get_nodes())
        except (NotImplementedError, TypeError, ValueError):  # stores without text, and those that want ids
            return None
    if isinstance(given, BaseRetriever):
        inner = [getattr(given, name, None) for name in ("_index", "_vector_store")]
        return next((found for one in inner if one is not None and (found := _held(one)) is not None), None)
    return None
