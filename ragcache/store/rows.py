"""Queries for rows, and conversion between rows and records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import RowMapping, Select, and_, exists, func, select

from ragcache.store.filters import Filter, Own, compile_filter
from ragcache.store.records import Chunk, NewChunk, NewDocument, StoredDocument, VectorBatch
from ragcache.store.schema import chunks, collections, documents, windows

# Little endian on every machine: a database may be copied to a different machine.
_TOKEN = np.dtype("<i4")
_COMPONENT = np.dtype("<f4")
IN_LIMIT = 1000  # values in one IN list
_T = TypeVar("_T")


def parts_of(values: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield the values in parts of at most IN_LIMIT, for a query each."""
    return (values[start : start + IN_LIMIT] for start in range(0, len(values), IN_LIMIT))


def select_documents() -> Select[Any]:
    """Return a query for documents with sums over their chunks."""
    sums = (
        select(
            chunks.c.collection,
            chunks.c.document_id,
            func.count().label("num_chunks"),
            func.sum(chunks.c.num_tokens).label("num_tokens"),
            (func.count() - func.count(chunks.c.handle)).label("num_pending"),
        )
        .group_by(chunks.c.collection, chunks.c.document_id)
        .subquery()
    )
    totals = (func.coalesce(sums.c[name], 0).label(name) for name in ("num_chunks", "num_tokens", "num_pending"))
    own = and_(sums.c.collection == documents.c.collection, sums.c.document_id == documents.c.id)
    return select(documents, *totals).outerjoin(sums, own)


def document(row: RowMapping) -> StoredDocument:
    return StoredDocument(**{**row, "num_tokens": int(row["num_tokens"])})


def select_chunks() -> Select[Any]:
    """Return a query for chunks without their embeddings, with source and title of their documents, and with the secret
    of their collection."""
    columns = [column for column in chunks.c if column.name not in ("embedding", "num_tokens")]
    salt = func.coalesce(collections.c.secret, "").label("salt")
    query = select(*columns, documents.c.source, documents.c.title, salt).join_from(chunks, documents)
    return query.outerjoin(collections, collections.c.name == chunks.c.collection)


def token_id_batch(read: Sequence[RowMapping]) -> list[tuple[int, NDArray[np.int32]]]:
    return [(int(row["vector_id"]), np.frombuffer(row["token_ids"], _TOKEN)) for row in read]


def select_vector_ids(where: Filter | None, dialect: str) -> Select[Any]:
    """Return a query for the vector ids of the chunks whose metadata, including their document's, pass the filter.
    Raises FilterError."""
    query = select(chunks.c.vector_id)
    if not where:
        return query
    document = and_(documents.c.collection == chunks.c.collection, documents.c.id == chunks.c.document_id)
    own: Own = {
        "source": lambda passes: exists().where(document, passes(documents.c.source)),
        "title": lambda passes: exists().where(document, passes(documents.c.title)),
        "document_id": lambda passes: passes(chunks.c.document_id),
        "chunk_id": lambda passes: passes(chunks.c.id),
    }
    return query.where(compile_filter(where, chunks.c.metadata, dialect, own))


def searched_ids(own: Select[Any]) -> Select[Any]:
    """Turn a query for chunks' own vector ids into a query for the ids of their searched vectors."""
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
    """Return the rows' ids and vectors. rows: at least one row, with vector_id and embedding"""
    ids: NDArray[np.int64] = np.array([row["vector_id"] for row in rows], dtype=np.int64)
    joined = np.frombuffer(b"".join(row["embedding"] for row in rows), _COMPONENT)
    return VectorBatch(ids, joined.reshape(len(rows), -1).astype(np.float32))
