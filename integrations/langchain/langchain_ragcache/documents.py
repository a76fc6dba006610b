"""Conversion between LangChain's documents and the store's chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.documents import Document

import ragcache as rc

HANDLE_KEY = rc.HANDLE_KEY


def to_document(chunk: rc.Chunk, handle: str | None = None) -> Document:
    """Return a chunk as a document, with the handle, if any, in its metadata.

    A document that was added as one passage comes back as it was. A passage cut out of a file gets its origin in
    "source" and "title", unless its metadata has them.
    """
    metadata = dict(chunk.metadata)
    if chunk.id != chunk.document_id:
        told = {"source": chunk.source, "title": chunk.title}
        metadata = {**{key: value for key, value in told.items() if value}, **metadata}
    if handle is not None:
        metadata[HANDLE_KEY] = handle
    return Document(id=chunk.id, page_content=chunk.text, metadata=metadata)


def to_passage(document: Document, id: str) -> rc.Document:
    """Return the document to store: its text as it is, and its metadata."""
    source = document.metadata.get("source")
    return rc.Document(id, document.page_content, document.metadata, source=source if isinstance(source, str) else "")


def without_handle(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != HANDLE_KEY}


def strip_handles(documents: Iterable[Document]) -> list[Document]:
    """Return copies without the handles of a retrieval, so that `langchain_core.indexing.index` may hash them."""
    return [document.model_copy(update={"metadata": without_handle(document.metadata)}) for document in documents]


def clean(value: Any) -> Any:
    """Return an argument of a vector store's method without handles in its documents and metadata."""
    if isinstance(value, dict):
        return {key: clean(one) for key, one in without_handle(value).items()}
    if isinstance(value, Document):
        return strip_handles([value])[0] if HANDLE_KEY in value.metadata else value
    holds = isinstance(value, list | tuple) and value and isinstance(value[0], Document | dict)
    return [clean(one) for one in value] if holds else value
