"""Records that go into a document store, and come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import RowMapping, Select, exists, func, select

from ragcache.errors import ConfigError, DuplicateDocumentError, IngestError
from ragcache.store.filters import Filter, Own, compile_filter
from ragcache.store.json_values import check_metadata, text_problem
from ragcache.store.places import place_text
from ragcache.store.schema import chunks, documents, windows

NOT_STORED = -1


@dataclass(frozen=True)
class NewDocument:
    """A document to store. metadata: a JSON object. file: place of the file that it was read from; "":
    none."""

    id: str
    source: str = ""
    content_hash: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    title: str = ""
    file: str = ""


class StoredVersion(NamedTuple):
    """Fields that tell unchanged input from changed. file: the file that it was read from, or ""."""

    content_hash: str
    source: str
    file: str


@dataclass(frozen=True, eq=False)
class NewChunk:
    """A chunk to store.

    embedding: float32 [embedding_dim]
    windows:   embeddings of the windows of a text that is longer than the embedder reads: searched in its embedding's
               place
    handle:    names the chunk's KV block; None when its KV is not computed yet
    metadata:  the chunk's own, on top of its document's
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
    """A document as stored. Times are Unix seconds; num_pending counts chunks without a handle; file: the file that it
    was read from, "" where there was none."""

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

    @property
    def state(self) -> str:
        """ "ready", or "pending" while the KV of a chunk is to be computed on first use."""
        return "pending" if self.num_pending else "ready"


@dataclass(frozen=True)
class Chunk:
    """A chunk as stored.

    ordinal:   place in its document, from 0
    metadata:  the document's with the chunk's own on top
    vector_id: the chunk's name in the vector index; never given to another chunk; NOT_STORED for a passage from outside
    source, title: the document's
    neighbours: ids of the chunks that its KV is read behind, in the order of reading, where that is looked up
    cut_from: where token_ids are a part of the passage: all of its ids, and how many of them stand before the part
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
    neighbours: tuple[tuple[int, ...], ...] = ()
    cut_from: tuple[tuple[int, ...], int] | None = None

    def part(self, start: int, stop: int) -> Chunk:
        """The chunk with some of its tokens, whose KV is cut from that of all."""
        if stop - start == len(self.token_ids):
            return self
        return replace(self, token_ids=self.token_ids[start:stop], cut_from=(tuple(self.token_ids), start))

    @property
    def whole(self) -> Chunk:
        """The chunk with all of its tokens."""
        return self if self.cut_from is None else replace(self, token_ids=list(self.cut_from[0]), cut_from=None)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def state(self) -> str:
        return "ready" if self.handle else "pending"

    @property
    def place(self) -> str:
        """Where in its document the passage is, in words such as "p. 3"; "" where nothing says so."""
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


# Between rows and records.


# Little endian, whatever the machine: a database may be copied to another one.
_TOKEN = np.dtype("<i4")
_COMPONENT = np.dtype("<f4")


def select_documents() -> Select[Any]:
    """Documents with sums over their chunks."""
    sums = (
        select(
            chunks.c.document_id,
            func.count().label("num_chunks"),
            func.sum(chunks.c.num_tokens).label("num_tokens"),
            (func.count() - func.count(chunks.c.handle)).label("num_pending"),
        )
        .group_by(chunks.c.document_id)
        .subquery()
    )
    totals = (func.coalesce(sums.c[name], 0).label(name) for name in ("num_chunks", "num_tokens", "num_pending"))
    return select(documents, *totals).outerjoin(sums, sums.c.document_id == documents.c.id)


def document(row: RowMapping) -> StoredDocument:
    return StoredDocument(**{**row, "num_tokens": int(row["num_tokens"])})


def select_chunks() -> Select[Any]:
    """Chunks without their embeddings, with source and title of their documents."""
    columns = [column for column in chunks.c if column.name not in ("embedding", "num_tokens")]
    return select(*columns, documents.c.source, documents.c.title).join_from(chunks, documents)


def token_id_batch(read: Sequence[RowMapping]) -> list[tuple[int, NDArray[np.int32]]]:
    return [(int(row["vector_id"]), np.frombuffer(row["token_ids"], _TOKEN)) for row in read]


def select_vector_ids(where: Filter | None, dialect: str) -> Select[Any]:
    """Vector ids of the chunks whose metadata (their document's included) pass the filter. Raises FilterError."""
    query = select(chunks.c.vector_id)
    if not where:
        return query
    document = documents.c.id == chunks.c.document_id
    own: Own = {
        "source": lambda passes: exists().where(document, passes(documents.c.source)),
        "title": lambda passes: exists().where(document, passes(documents.c.title)),
        "document_id": lambda passes: passes(chunks.c.document_id),
        "chunk_id": lambda passes: passes(chunks.c.id),
    }
    return query.where(compile_filter(where, chunks.c.metadata, dialect, own))


def searched_ids(own: Select[Any]) -> Select[Any]:
    """Turn a query for chunks' own vector ids into that for the ids of the vectors by which they are found."""
    found = own.outerjoin(windows, windows.c.chunk == chunks.c.vector_id)
    return found.with_only_columns(func.coalesce(windows.c.vector_id, chunks.c.vector_id))


def chunk(row: RowMapping) -> Chunk:
    return Chunk(**{**row, "token_ids": np.frombuffer(row["token_ids"], _TOKEN).tolist()})


def chunk_values(document: NewDocument, new: NewChunk, ordinal: int, vector_id: int, now: float) -> dict[str, Any]:
    own = {name: value for name, value in vars(new).items() if name != "windows"}
    return {
        **own,
        "document_id": document.id,
        "ordinal": ordinal,
        "token_ids": np.asarray(new.token_ids, dtype=_TOKEN).tobytes(),
        "num_tokens": len(new.token_ids),
        "metadata": {**document.metadata, **new.metadata},
        "embedding": vector_bytes(new.embedding),
        "vector_id": vector_id,
        "created_at": now,
    }


def vector_bytes(vector: NDArray[np.float32]) -> bytes:
    return np.ascontiguousarray(vector, dtype=_COMPONENT).tobytes()


def vector_batch(rows: Sequence[RowMapping]) -> VectorBatch:
    """rows: at least one, with vector_id and embedding."""
    ids: NDArray[np.int64] = np.array([row["vector_id"] for row in rows], dtype=np.int64)
    joined = np.frombuffer(b"".join(row["embedding"] for row in rows), _COMPONENT)
    return VectorBatch(ids, joined.reshape(len(rows), -1).astype(np.float32))


# Checks that both databases can hold a document, before either sees it.


def check_document(document: NewDocument, chunks: Sequence[NewChunk]) -> None:
    """Raises IngestError (text), MetadataError, DuplicateDocumentError (chunk ids) or ConfigError (embeddings)."""
    if not document.id:
        raise IngestError("a document without an id; give it one")
    what = f"document {document.id!r}"
    texts = [document.id, document.source, document.title, document.content_hash, document.file]
    texts += [text for chunk in chunks for text in (chunk.id, chunk.text, chunk.handle or "")]
    if problem := next(filter(None, map(text_problem, texts)), None):
        raise IngestError(f"{what}: its text holds {problem}; remove it before it is stored")
    check_metadata(what, document.metadata)
    seen: set[str] = set()
    for chunk in chunks:
        if not chunk.id or chunk.id in seen:
            raise DuplicateDocumentError(f"{what}: two chunks with the id {chunk.id!r}")
        seen.add(chunk.id)
        check_metadata(what, chunk.metadata)
        for vector in (chunk.embedding, *chunk.windows):
            if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all():
                raise ConfigError(f"chunk {chunk.id!r}: its embedding is not a vector of finite numbers")
    if len({len(vector) for chunk in chunks for vector in (chunk.embedding, *chunk.windows)}) > 1:
        raise ConfigError(f"{what}: its embeddings differ in length")
