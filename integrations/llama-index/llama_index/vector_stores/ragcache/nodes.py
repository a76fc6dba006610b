"""Conversion of nodes to passages of the store, and back.

A node is stored as a document with a single passage: id and text are the node's, and its other fields go into the
document's metadata. The handle of its KV block is added when a node is returned, and never stored with it: it would be
stale as soon as model or text change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core import schema

import ragcache as rc
from ragcache.errors import ConfigError, MetadataError

HANDLE_KEY = rc.HANDLE_KEY
ID_FIELD = "_node_id"
REF_FIELD = "_ref_doc_id"
_CONTENT, _KIND = "_node_content", "_node_type"
_RESERVED = (ID_FIELD, REF_FIELD, _CONTENT, _KIND)
_KINDS: dict[str, type[schema.BaseNode]] = {
    kind.class_name(): kind
    for kind in (
        schema.TextNode,
        schema.Node,
        schema.Document,
        schema.ImageNode,
        schema.ImageDocument,
        schema.IndexNode,
    )
}
_COUNTED = ("page", "last_page")
_HIDDEN = ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")


def to_document(node: schema.BaseNode) -> rc.Document:
    """Return the document that stores the node.

    Raises MetadataError (not JSON, or a reserved key), IngestError (no id), ReaderError (no text), ConfigError (a text
    template that puts metadata after the text).
    """
    node = bare(node)
    text, metadata = node.get_content(metadata_mode=schema.MetadataMode.NONE), node.metadata
    taken = [key for key in _RESERVED if key in metadata]
    if taken:
        raise MetadataError(f"node {node.node_id}: the metadata key {taken[0]!r} is used by the store; rename it")
    document = rc.Document(node.node_id, text, metadata, _read_above(node, text), _origin(metadata))
    document.check()
    return rc.Document(document.id, text, {**metadata, **_kept(node)}, document.title, document.source)


def to_node(chunk: rc.Chunk) -> schema.BaseNode:
    """Return the node as it was stored; for a passage that was ingested without LlamaIndex, a new TextNode.

    Node fields in the metadata are only trusted if they name this passage, because metadata may have come through
    another library.
    """
    if is_node(chunk.document_id, chunk.metadata):
        return _restored(chunk.metadata, chunk.text)
    source = {schema.NodeRelationship.SOURCE: schema.RelatedNodeInfo(node_id=chunk.document_id)}
    known = {name: value for name, value in (("title", chunk.title), ("source", chunk.source)) if value}
    # Page numbers count from 0 here, so a model is shown only the page label.
    hidden = {name: list(_COUNTED) for name in _HIDDEN}
    metadata = {**known, **_open(chunk.metadata)}
    return schema.TextNode(id_=chunk.id, text=chunk.text, metadata=metadata, relationships=source, **hidden)


def to_scored_node(hit: rc.Hit) -> schema.NodeWithScore:
    return schema.NodeWithScore(node=with_handle(to_node(hit.chunk), hit.handle), score=hit.score)


def is_node(id: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether this metadata belongs to a document that stores a node with this id."""
    return _CONTENT in metadata and metadata.get(ID_FIELD) == id


def with_handle(node: schema.BaseNode, handle: str | None) -> schema.BaseNode:
    """Return a copy with the handle, if any, in its metadata, hidden from the language model and the embedder."""
    named = {} if handle is None else {HANDLE_KEY: handle}
    hidden = {name: [*_without_handle(getattr(node, name)), *named] for name in _HIDDEN}
    return node.model_copy(update={"metadata": {**bare(node).metadata, **named}, **hidden})


def bare(node: schema.BaseNode) -> schema.BaseNode:
    """Return a copy without the handle of a search; the node itself if it has none."""
    if not any(HANDLE_KEY in getattr(node, name) for name in ("metadata", *_HIDDEN)):
        return node
    hidden = {name: _without_handle(getattr(node, name)) for name in _HIDDEN}
    known = {key: value for key, value in node.metadata.items() if key != HANDLE_KEY}
    return node.model_copy(update={"metadata": known, **hidden})


def _without_handle(keys: Sequence[str]) -> list[str]:
    return [key for key in keys if key != HANDLE_KEY]


def handle_of(node: schema.BaseNode) -> str | None:
    handle = node.metadata.get(HANDLE_KEY)
    return handle if isinstance(handle, str) else None


def embedded_text(node: schema.BaseNode) -> str:
    """Return the text that an embedding model reads by LlamaIndex's rules: the node's metadata above its text."""
    return node.get_content(metadata_mode=schema.MetadataMode.EMBED)


def _read_above(node: schema.BaseNode, text: str) -> str:
    """Return the text that the embedder reads above the node's text. The store puts it there, followed by a
    newline, as a document's title, so that its vectors equal LlamaIndex's.
    """
    embedded, ending = embedded_text(node).rstrip(), text.rstrip()
    if not ending or embedded == ending:
        return ""
    if not embedded.endswith(f"\n{ending}"):
        raise ConfigError(
            f"node {node.node_id}: its text_template writes metadata behind or into the text; the store embeds a "
            "passage below its metadata: end the template with '\\n{content}'"
        )
    return embedded.removesuffix(f"\n{ending}")


def _origin(metadata: Mapping[str, Any]) -> str:
    """Return where the node came from, for display."""
    found = (metadata.get(key) for key in ("source", "file_path", "file_name", "url"))
    return next((value for value in found if isinstance(value, str) and value), "")


def _kept(node: schema.BaseNode) -> dict[str, Any]:
    """Return the node's fields as JSON values, without text, metadata, embedding and handle."""
    try:
        whole = node.to_dict(mode="json")
        whole.update(metadata={}, embedding=None)
        _set_text(whole, "")
        content = json.dumps(whole, ensure_ascii=False)
    except (TypeError, ValueError) as error:  # pydantic's serialisation errors are ValueErrors
        raise MetadataError(
            f"node {node.node_id} cannot be written as JSON ({error}); leave out what is not"
        ) from error
    return {
        _CONTENT: content,
        _KIND: node.class_name(),
        ID_FIELD: node.node_id,
        REF_FIELD: node.ref_doc_id or node.node_id,
    }


def _restored(stored: Mapping[str, Any], text: str) -> schema.BaseNode:
    whole = json.loads(stored[_CONTENT])
    whole["metadata"] = _open(stored)
    _set_text(whole, text)
    return _KINDS.get(stored[_KIND], schema.TextNode).from_dict(whole)


def _open(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata without the fields that store a node."""
    return {key: value for key, value in metadata.items() if key not in _RESERVED}


def _set_text(whole: dict[str, Any], text: str) -> None:
    """Set the text in a node's dictionary. A multimodal node keeps it in a resource of its own."""
    if isinstance(whole.get("text_resource"), dict):
        whole["text_resource"]["text"] = text
    if "text" in whole:
        whole["text"] = text
