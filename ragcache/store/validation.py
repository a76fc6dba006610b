"""Checks that both databases can hold a document, before either sees it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache.errors import ConfigError, DuplicateDocumentError, IngestError, MetadataError
from ragcache.store.records import NewChunk, NewDocument

MAX_DEPTH = 64


def check_document(document: NewDocument, chunks: Sequence[NewChunk]) -> None:
    """Raises IngestError (text), MetadataError, DuplicateDocumentError (chunk ids) or ConfigError (embeddings)."""
    if not document.id:
        raise IngestError("a document without an id; give it one")
    for text in (document.id, document.source, document.title, document.content_hash, document.file):
        _check_text(document.id, text)
    check_metadata(document.id, document.metadata)
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
    check_metadata(document_id, chunk.metadata)
    if chunk.embedding.ndim != 1 or not len(chunk.embedding) or not np.isfinite(chunk.embedding).all():
        raise ConfigError(f"chunk {chunk.id!r}: its embedding is not a vector of finite numbers")


def check_metadata(document_id: str, metadata: object) -> None:
    """Raises MetadataError when metadata is not a JSON object that both databases can hold."""
    if not isinstance(metadata, dict):
        raise MetadataError(f"document {document_id!r}: metadata is a {type(metadata).__name__}; give a JSON object")
    problem = _json_problem(metadata, 0)
    if problem:
        raise MetadataError(f"document {document_id!r}: metadata holds {problem}, which JSON in a database cannot")


def _json_problem(value: object, depth: int) -> str | None:
    """Name what is wrong with a value, or None."""
    if depth > MAX_DEPTH:
        return f"more than {MAX_DEPTH} levels"
    if value is None or isinstance(value, bool | int):
        return None
    if isinstance(value, float):
        return None if np.isfinite(value) else str(value)
    if isinstance(value, str):
        return text_problem(value)
    if isinstance(value, list | tuple):
        return next((problem for item in value if (problem := _json_problem(item, depth + 1))), None)
    if isinstance(value, dict):
        return next((problem for pair in value.items() if (problem := _pair_problem(*pair, depth + 1))), None)
    return f"a {type(value).__name__}"


def _pair_problem(key: object, value: object, depth: int) -> str | None:
    if not isinstance(key, str):
        return f"the key {key!r}, no string"
    return text_problem(key) or _json_problem(value, depth)


def _check_text(document_id: str, text: str) -> None:
    problem = text_problem(text)
    if problem:
        raise IngestError(f"document {document_id!r}: its text holds {problem}; remove it before it is stored")


def text_problem(text: str) -> str | None:
    """PostgreSQL takes no NUL, and neither database half of a surrogate pair."""
    if "\0" in text:
        return "a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair"
    return None
