"""Checks that both databases can hold a document, before either sees it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache.errors import ConfigError, DuplicateDocumentError, IngestError
from ragcache.store.json_values import check_metadata, text_problem
from ragcache.store.records import NewChunk, NewDocument


def check_document(document: NewDocument, chunks: Sequence[NewChunk]) -> None:
    """Raises IngestError (text), MetadataError, DuplicateDocumentError (chunk ids) or ConfigError (embeddings)."""
    if not document.id:
        raise IngestError("a document without an id; give it one")
    for text in (document.id, document.source, document.title, document.content_hash, document.file):
        _check_text(document.id, text)
    check_metadata(f"document {document.id!r}", document.metadata)
    seen: set[str] = set()
    for chunk in chunks:
        if not chunk.id or chunk.id in seen:
            raise DuplicateDocumentError(f"document {document.id!r}: two chunks with the id {chunk.id!r}")
        seen.add(chunk.id)
        _check_chunk(document.id, chunk)
    if len({len(chunk.embedding) for chunk in chunks}) > 1:
        raise ConfigError(f"document {document.id!r}: its embeddings differ in length")


def _check_chunk(document_id: str, chunk: NewChunk) -> None:
    _check_text(document_id, chunk.id)
    _check_text(document_id, chunk.text)
    _check_text(document_id, chunk.handle or "")
    check_metadata(f"document {document_id!r}", chunk.metadata)
    if chunk.embedding.ndim != 1 or not len(chunk.embedding) or not np.isfinite(chunk.embedding).all():
        raise ConfigError(f"chunk {chunk.id!r}: its embedding is not a vector of finite numbers")


def _check_text(document_id: str, text: str) -> None:
    problem = text_problem(text)
    if problem:
        raise IngestError(f"document {document_id!r}: its text holds {problem}; remove it before it is stored")
