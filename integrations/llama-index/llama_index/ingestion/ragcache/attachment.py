"""Attachment of a user's own index, vector store or retriever to a ragcache store that keeps the KV of its nodes.

Only KV and the name of each passage's document are kept here: embeddings, texts and searches stay where they are. The
model reads a node as LlamaIndex's synthesizers give it: its metadata above its text (`MetadataMode.LLM`).
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
    """A transformation that computes the KV of nodes in a pipeline; nothing is embedded or stored with it.

    Use it as a step of an IngestionPipeline after the step that splits nodes. Nodes are returned with their handles,
    hidden from the model and the embedder; nodes that the model cannot read are returned as they are.

        kb: an open store, or the path of a store (`rc.open_shared`)
        collection: see `ragcache.RagCache.precompute`
        metadata_mode: the part of a node's metadata that the model will read
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
        """Return copies of the nodes with handles. Raises the errors of `ragcache.RagCache.precompute`."""
        passages = [to_passage(node, self.metadata_mode) for node in nodes]
        return with_handles(nodes, self._kb.precompute(passages, collection=self.collection).handles)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        passages = [to_passage(node, self.metadata_mode) for node in nodes]
        report = await self._kb.aprecompute(passages, collection=self.collection)
        return with_handles(nodes, report.handles)


class LlamaIndexAdapter:
    """Adapter of LlamaIndex's objects for `rc.RagCache.precompute` and `rc.attach`."""

    def documents(self, given: Any) -> Iterable[rc.Document]:
        """Return the nodes of an object as documents. Raises ConfigError if the object does not give them."""
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
        """Return the hooks for an object's methods. The option metadata_mode says which metadata of a node the
        model will read. Raises ConfigError for another option or object.
        """
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
    """Functions that run after the methods of an attached object."""

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
        else:  # deleted by filters: nodes that the store still holds stay
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
    """Return the text that the model reads of a node, with its id and the id of the document that it was cut from."""
    node = bare(node)  # modes that read all metadata would read the handle
    text = node.get_content(metadata_mode=mode)
    return rc.Document(node.node_id, text, node.metadata, source=node.ref_doc_id or "")


def with_handles(nodes: Sequence[BaseNode], handles: Sequence[str | None]) -> list[BaseNode]:
    """Return copies of the nodes with their handles in the metadata."""
    return [with_handle(node, handle) for node, handle in zip(nodes, handles, strict=True)]


def clean(value: Any) -> Any:
    """Return an argument of an index's or a store's method without handles in its nodes."""
    if isinstance(value, BaseNode):
        return bare(value)
    holds = isinstance(value, list | tuple) and value and isinstance(value[0], BaseNode)
    return [clean(one) for one in value] if holds else value


def _held(given: Any) -> Iterable[BaseNode] | None:
    """Return the nodes of an index, a store that returns them, or a retriever over either; None: unknown."""
    if isinstance(given, BaseIndex):
        return list(given.docstore.docs.values()) or _held(getattr(given, "vector_store", None))
    if isinstance(given, BasePydanticVectorStore):
        try:
            return list(given.get_nodes())
        except (NotImplementedError, TypeError, ValueError):  # stores without text, and those that need ids
            return None
    if isinstance(given, BaseRetriever):
        inner = [getattr(given, name, None) for name in ("_index", "_vector_store")]
        return next((found for one in inner if one is not None and (found := _held(one)) is not None), None)
    return None
