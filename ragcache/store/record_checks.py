"""Checks that both databases can hold a document, before it is written to either."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache.errors import ConfigError, DuplicateDocumentError, IngestError
from ragcache.store.json_values import check_metadata, text_problem
from ragcache.store.records import NewChunk, NewDocument


def check_document(document: NewDocument, chunks: Sequence[NewChunk]) -> None:
    """Raise IngestError (text), MetadataError, DuplicateDocumentError (chunk ids) or ConfigError (embeddings)."""
    if not document.id:
        raise IngestError("a document without an id; give it one")
    name = f"document {document.id!r}"
    texts = [document.id, document.source, document.title, document.content_hash, document.file]
    texts += [text for chunk in chunks for text in (chunk.id, chunk.text, chunk.handle or "")]
    if problem := next(filter(None, map(text_problem, texts)), None):
        raise IngestError(f"{name}: its text holds {problem}; remove it before it is stored")
    check_metadata(name, document.metadata)
    seen: set[str] = set()
    for chunk in chunks:
        if not chunk.id or chunk.id in seen:
            raise DuplicateDocumentError(f"{name}: two chunks with the id {chunk.id!r}")
        seen.add(chunk.id)
        check_metadata(name, chunk.metadata)
        for vector in (chunk.embedding, *chunk.windows):
            if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all():
                raise ConfigError(f"chunk {chunk.id!r}: its embedding is not a vector of finite numbers")
    if len({len(vector) for chunk in chunks for vector in (chunk.embedding, *chunk.windows)}) > 1:
        raise ConfigError(f"{name}: its embeddings differ in length")
