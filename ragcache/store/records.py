"""Records that are written to a document store and read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import ConfigError, DuplicateDocumentError, IngestError
from ragcache.store.json_values import check_metadata, text_problem
from ragcache.store.places import place_text

NOT_STORED = -1


@dataclass(frozen=True)
class NewDocument:
    """A document to store.

    content_hash: distinguishes changed from unchanged input
    metadata:     a JSON object
    file:         `SourceFile.place` of the file that it was read from, or ""
    """

    id: str
    source: str = ""
    content_hash: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    title: str = ""
    file: str = ""

    def check(self, chunks: Sequence[NewChunk]) -> None:
        """Check that both databases can hold the document.

        Raises IngestError (text), MetadataError, DuplicateDocumentError (chunk ids) or ConfigError (embeddings).
        """
        if not self.id:
            raise IngestError("a document without an id; give it one")
        name = f"document {self.id!r}"
        texts = [self.id, self.source, self.title, self.content_hash, self.file]
        texts += [text for chunk in chunks for text in (chunk.id, chunk.text, chunk.handle or "")]
        if problem := next(filter(None, map(text_problem, texts)), None):
            raise IngestError(f"{name}: its text holds {problem}; remove it before it is stored")
        check_metadata(name, self.metadata)
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


class StoredVersion(NamedTuple):
    """Fields that distinguish changed from unchanged input. file: the file that the document was read from, or ""."""

    content_hash: str
    source: str
    file: str


@dataclass(frozen=True, eq=False)
class NewChunk:
    """A chunk to store.

    embedding: float32 [embedding_dim]
    windows:   embeddings of the text's windows, if the text is longer than the embedder reads: searched instead of
               `embedding`
    handle:    names the chunk's KV block; None when its KV is not computed yet
    metadata:  the chunk's own metadata, which override its document's
    """

    id: str
    text: str
    token_ids: Sequence[int]
    embedding: NDArray[np.float32]
    handle: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    windows: Sequence[NDArray[np.float32]] = ()


@dataclass(frozen=True)
class StoredDocument:
    """A document as stored. Times are Unix seconds; num_pending counts chunks without a handle; file: the file that the
    document was read from, or ""."""

    id: str
    source: str
    title: str
    content_hash: str
    metadata: dict[str, Any]
    created_at: float
    updated_at: float
    file: str
    num_chunks: int
    num_tokens: int
    num_pending: int
    collection: str = ""

    @property
    def state(self) -> str:
        """Return "ready", or "pending" while the KV of at least one chunk has yet to be computed on first use."""
        return "pending" if self.num_pending else "ready"


@dataclass(frozen=True)
class Chunk:
    """A chunk as stored.

    ordinal:   place in its document, from 0
    metadata:  the document's metadata, overridden by the chunk's own
    vector_id: the chunk's name in the vector index, never reused; NOT_STORED for a passage that was not ingested
    source, title: the document's
    collection: its document's collection
    salt:      the collection's secret, which is part of the KV's names; None for a passage that was not ingested
    neighbours: ids of the chunks that precede this chunk when its KV is computed, in reading order, if looked up
    cut_from: if token_ids are a part of the passage: all of the passage's ids, and how many of them precede the part
    is_learnt: whether it is a piece of earlier prompts, which no caller supplied as a passage
    """

    id: str
    document_id: str
    ordinal: int
    text: str
    token_ids: list[int]
    metadata: dict[str, Any]
    vector_id: int
    handle: str | None
    created_at: float
    source: str
    title: str
    collection: str = ""
    salt: str | None = None
    neighbours: tuple[tuple[int, ...], ...] = ()
    cut_from: tuple[tuple[int, ...], int] | None = None
    is_learnt: bool = False

    def part(self, start: int, stop: int) -> Chunk:
        """Return the chunk reduced to the tokens [start:stop], whose KV is cut from the whole chunk's KV."""
        if stop - start == len(self.token_ids):
            return self
        return replace(self, token_ids=self.token_ids[start:stop], cut_from=(tuple(self.token_ids), start))

    @property
    def whole(self) -> Chunk:
        """Return the chunk with all of its tokens."""
        return self if self.cut_from is None else replace(self, token_ids=list(self.cut_from[0]), cut_from=None)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def state(self) -> str:
        return "ready" if self.handle else "pending"

    @property
    def place(self) -> str:
        """Return the passage's place in its document, in words such as "p. 3", or "" if unknown."""
        return place_text(self.metadata, self.title)

    @property
    def is_stored(self) -> bool:
        return self.vector_id != NOT_STORED


class VectorBatch(NamedTuple):
    """ids: int64 [n], rising. vectors: float32 [n, embedding_dim]."""

    ids: NDArray[np.int64]
    vectors: NDArray[np.float32]


class Counts(NamedTuple):
    documents: int
    chunks: int
    tokens: int
