"""Vectors in a table of the PostgreSQL database that holds the documents, by the extension pgvector."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    ForeignKey,
    MetaData,
    Table,
    Text,
    cast,
    delete,
    func,
    insert,
    inspect,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.types import Double, UserDefinedType

from ragcache.errors import ConfigError, StoreNotFoundError, StoreReadOnlyError, check_least
from ragcache.retrieval.faiss_kinds import HNSW_EF_CONSTRUCTION, HNSW_EF_SEARCH, HNSW_NEIGHBOURS, Ids, Stored, Vectors
from ragcache.retrieval.vector_index import SearchResult, ranked, rows_among
from ragcache.store.database import Database
from ragcache.store.documents import DocumentStore
from ragcache.store.filters import Filter
from ragcache.store.records import VectorBatch, select_vector_ids, vector_batch
from ragcache.store.schema import PREFIX, chunks, counters

EXTENSION = "vector"
TABLE = PREFIX + "vectors"
GRAPH = TABLE + "_hnsw"
FILLED = "pgvector"  # counter: the chunks up to this vector id have their vector in the table, or are gone
BATCH = 1000
# Limits of pgvector: numbers of a vector that HNSW indexes, and candidates that its search keeps.
MOST_GRAPH_DIMENSION, MOST_EF_SEARCH = 2000, 1000
_LOCK = 7_231_554_191  # any number will do, as long as every process takes the same


class PgVectorIndex:
    """A row for each chunk's vector, which the database deletes with the chunk. Every process sees the same table.

    An HNSW index of pgvector's is made with the table; without it (dropped, or a vector has more than 2,000 numbers)
    every search is exact. The table is derived from the chunks' embeddings: what is missing is copied from there.

    Raises ConfigError (another database, no extension, a table of another dimension), StoreNotFoundError (opened
    read-only before anything was made).
    """

    kind = "pgvector"

    def __init__(self, database: Database, dimension: int, *, embedder: str, stored: Stored) -> None:
        if database.dialect != "postgresql":
            raise ConfigError(
                "index 'pgvector' keeps vectors in PostgreSQL: open the store with database=\"postgresql://...\" "
                "(--database), or choose flat, hnsw or ivfpq"
            )
        check_least("dimension", dimension, 1)
        self.dimension = dimension
        self.embedder = embedder
        self.generation = -1
        self._db = database
        self._stored = stored
        self._schema = _extension(database)
        self._table = _table(self._schema, dimension)
        self._prepare()

    @property
    def saved_generation(self) -> int:
        """Nothing is ever left to save."""
        return self.generation

    @property
    def ids(self) -> frozenset[int]:
        with self._db.read() as connection:
            return frozenset(connection.scalars(select(self._table.c.vector_id)))

    def __len__(self) -> int:
        with self._db.read() as connection:
            return int(connection.scalar(select(func.count()).select_from(self._table)) or 0)

    def follow(self, _documents: DocumentStore) -> None:
        """Copy the vectors of chunks stored since the table was last filled; a reader leaves that to others."""
        filled = 0 if self._db.read_only else BATCH
        while filled == BATCH:
            with self._db.write() as connection:
                filled = self._fill(connection)

    def take(
        self, documents: DocumentStore, _added: Sequence[int], _vectors: Vectors, _removed: Collection[int]
    ) -> None:
        """The same: the database holds what was added, and has deleted what was removed."""
        self.follow(documents)

    def compact(self) -> None:
        """Nothing to do: a deleted row is gone for every search; PostgreSQL's vacuum frees its place."""

    def save(self, _path: Path) -> None:
        """Nothing to do: what was returned from is in the database."""

    def find(self, _documents: DocumentStore, vector: Vectors, k: int, where: Filter | None) -> SearchResult:
        """The k ids of largest inner product among the chunks that pass the filter; all of them when there are fewer.

        Raises ConfigError when k < 1 or the vector does not fit.
        """
        check_least("k", k, 1)
        if np.shape(vector) != (self.dimension,) or not np.isfinite(vector).all():
            raise ConfigError(f"the vector has shape {np.shape(vector)}; it needs {self.dimension} finite numbers")
        column = self._table.c.embedding
        negative: ColumnElement[float] = column.op(f'OPERATOR("{self._schema}".<#>)', return_type=Double())(
            cast(literal(_as_text(vector), Text), column.type)
        )
        query = select(self._table.c.vector_id, -negative).order_by(negative).limit(k)
        if where:
            query = query.where(self._table.c.vector_id.in_(select_vector_ids(where, self._db.dialect)))
        with self._db.read() as connection:
            width = min(MOST_EF_SEARCH, max(HNSW_EF_SEARCH, 2 * k))
            connection.execute(text(f"SET LOCAL hnsw.ef_search = {width}"))
            found = connection.execute(query).all()
            if len(found) < k:  # a narrow filter, or a wider search than HNSW makes: look at every row
                connection.execute(text("SET LOCAL enable_indexscan = off"))
                found = connection.execute(query).all()
        ids, scores = zip(*found, strict=True) if found else ((), ())
        return ranked(np.array(ids, np.int64), np.array(scores, np.float32))

    def vectors_present(self, ids: Ids) -> tuple[Ids, Vectors]:
        """Rows of `ids` that are still stored, and their vectors."""
        return rows_among(ids, self._stored(ids))

    def agrees(self, batch: VectorBatch) -> bool:
        """Whether the table holds these vectors."""
        table = self._table.c
        query = select(table.vector_id, cast(table.embedding, Text)).where(table.vector_id.in_(batch.ids.tolist()))
        with self._db.read() as connection:
            found = connection.execute(query.order_by(table.vector_id)).all()
        if [id for id, _ in found] != batch.ids.tolist():
            return False
        return np.array_equal(np.array([json.loads(row) for _, row in found], np.float32), batch.vectors)

    def clear(self) -> None:
        """Empty the table, to be filled again."""
        with self._db.write() as connection:
            self._reset(connection)
            connection.execute(delete(self._table))

    def _fill(self, connection: Connection) -> int:
        """Copy some vectors; returns how many.

        Ids rise from commit to commit, so nothing is ever missing below the counter. Processes take turns at it, and
        chunks are locked against being deleted until their vectors are in.
        """
        counter = update(counters).where(counters.c.name == FILLED)
        last = connection.scalar(counter.values(value=counters.c.value).returning(counters.c.value))
        query = select(chunks.c.vector_id, chunks.c.embedding).where(chunks.c.vector_id > last)
        locked = query.order_by(chunks.c.vector_id).limit(BATCH).with_for_update(read=True, key_share=True)
        found = connection.execute(locked).mappings().all()
        if found:
            batch = vector_batch(found)
            rows = zip(batch.ids.tolist(), map(_as_text, batch.vectors), strict=True)
            connection.execute(insert(self._table), [{"vector_id": id, "embedding": row} for id, row in rows])
            connection.execute(counter.values(value=int(batch.ids[-1])))
        return len(found)

    def _prepare(self) -> None:
        """Make the table where there is none. Raises ConfigError for one of another dimension."""
        query = text("SELECT atttypmod FROM pg_attribute WHERE attrelid = to_regclass(:name) AND attname = 'embedding'")
        with self._db.read() as connection:
            dimension = connection.scalar(query, {"name": TABLE})
        if dimension == self.dimension:
            return
        if dimension is not None:
            raise ConfigError(
                f"{self._db.where}: table {TABLE} holds vectors of {dimension} numbers, the embedder makes "
                f"{self.dimension}; drop the table (DROP TABLE {TABLE}): it is filled again from the documents"
            )
        if self._db.read_only:
            raise StoreNotFoundError(f"{self._db.where}: no table {TABLE}; open the store once for writing to make it")
        with self._db.write() as connection:
            _take_turns(connection)
            if not inspect(connection).has_table(TABLE):
                self._create(connection)

    def _create(self, connection: Connection) -> None:
        self._table.create(connection)
        self._reset(connection)
        has_graphs = connection.scalar(text("SELECT 1 FROM pg_am WHERE amname = 'hnsw'"))  # since pgvector 0.5
        if has_graphs and self.dimension <= MOST_GRAPH_DIMENSION:
            connection.execute(text(
                f'CREATE INDEX {GRAPH} ON {TABLE} USING hnsw (embedding "{self._schema}".vector_ip_ops) '
                f"WITH (m = {HNSW_NEIGHBOURS}, ef_construction = {HNSW_EF_CONSTRUCTION})"
            ))  # fmt: skip

    def _reset(self, connection: Connection) -> None:
        """Count from 0, and hold the counter against other processes."""
        connection.execute(delete(counters).where(counters.c.name == FILLED))
        connection.execute(insert(counters), {"name": FILLED, "value": 0})


class _Vector(UserDefinedType[str]):
    """pgvector's type, wherever its extension is installed; values are text."""

    cache_ok = True

    def __init__(self, schema: str, dimension: int) -> None:
        self.schema = schema
        self.dimension = dimension

    def get_col_spec(self, **_options: Any) -> str:
        return f'"{self.schema}".vector({self.dimension})'


def _table(schema: str, dimension: int) -> Table:
    owner = ForeignKey(chunks.c.vector_id, ondelete="CASCADE")
    key = Column("vector_id", BigInteger, owner, primary_key=True, autoincrement=False)
    return Table(TABLE, MetaData(), key, Column("embedding", _Vector(schema, dimension), nullable=False))


def _as_text(vector: Vectors) -> str:
    return f"[{','.join(map(repr, vector.tolist()))}]"


def _extension(database: Database) -> str:
    """The schema of pgvector's extension, which is created where that is allowed."""
    if (schema := _schema_of_extension(database)) is not None:
        return schema
    if database.read_only:
        raise StoreNotFoundError(f"{database.where}: no extension {EXTENSION!r}; open the store once for writing")
    with database.read() as connection:
        query = text("SELECT 1 FROM pg_available_extensions WHERE name = :name")
        if not connection.scalar(query, {"name": EXTENSION}):
            raise ConfigError(
                f"{database.where}: the server has no extension {EXTENSION!r}; install pgvector there (Debian: "
                "postgresql-VERSION-pgvector), or choose index flat, hnsw or ivfpq"
            )
    try:
        with database.write() as connection:
            _take_turns(connection)
            connection.execute(text(f"CREATE EXTENSION IF NOT EXISTS {EXTENSION}"))
    except StoreReadOnlyError as error:
        raise ConfigError(
            f"{database.where}: this role may not create extension {EXTENSION!r}; have an administrator run CREATE "
            f"EXTENSION {EXTENSION} in the database, or choose index flat, hnsw or ivfpq ({error})"
        ) from error
    return str(_schema_of_extension(database))


def _schema_of_extension(database: Database) -> str | None:
    query = "SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = :name"
    with database.read() as connection:
        found = connection.scalar(text(query), {"name": EXTENSION})
    return None if found is None else str(found)


def _take_turns(connection: Connection) -> None:
    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
