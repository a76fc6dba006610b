"""Vectors in a table of the PostgreSQL database that holds the documents, by the extension pgvector."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa
from sqlalchemy.types import Double, UserDefinedType

from ragcache.errors import ConfigError, StoreNotFoundError, StoreReadOnlyError, check_least
from ragcache.retrieval.faiss_kinds import HNSW_EF_CONSTRUCTION, HNSW_EF_SEARCH, HNSW_NEIGHBOURS, Ids, Vectors
from ragcache.retrieval.vector_index import SearchResult, ranked
from ragcache.store.database import Database
from ragcache.store.documents import DocumentStore
from ragcache.store.filters import Filter
from ragcache.store.records import VectorBatch
from ragcache.store.rows import vector_batch
from ragcache.store.schema import PREFIX, chunks, counters, has_windows, windows

EXTENSION = "vector"
TABLE = PREFIX + "vectors"
GRAPH = TABLE + "_hnsw"
FILLED = "pgvector"  # name of a counter: vectors up to this id were copied to the table
BATCH = 1000
# Limits of pgvector: the dimension that HNSW indexes, and the number of candidates that its search keeps.
MOST_GRAPH_DIMENSION, MOST_EF_SEARCH = 2000, 1000
_LOCK = 7_231_554_191  # any number that is the same in every process


class PgVectorIndex:
    """An index with a row for each chunk's vector, and a second table with a row for each window's vector. The database
    deletes rows with their chunk. Every process sees the same tables.

    An HNSW index of pgvector is made with each table; without it (if it was dropped, or a vector has more than 2,000
    numbers) every search is exact. The tables are derived from the chunks' embeddings: missing rows are copied from
    these.

    Raises ConfigError (another database, no extension, a table of another dimension), StoreNotFoundError (opened
    read-only before anything was made).
    """

    kind = "pgvector"

    def __init__(self, documents: DocumentStore, dimension: int, *, embedder: str) -> None:
        database = documents.database
        if database.dialect != "postgresql":
            raise ConfigError(
                "index 'pgvector' keeps vectors in PostgreSQL: open the store with database=\"postgresql://...\" "
                "(--database), or choose flat or hnsw"
            )
        check_least("dimension", dimension, 1)
        self.dimension = dimension
        self.embedder = embedder
        self.generation = -1
        self._db = database
        self._documents = documents
        self._schema = _extension(database)
        column = _Vector(self._schema, dimension)
        self._parts = (
            _Part(_table(TABLE, chunks, column), chunks, ~has_windows, FILLED),
            _Part(_table(f"{TABLE}_of_windows", windows, column), windows, sa.true(), f"{FILLED} windows"),
        )
        for part in self._parts:
            self._prepare(part)

    @property
    def saved_generation(self) -> int:
        """Return the current generation: nothing is ever left to save."""
        return self.generation

    @property
    def ids(self) -> frozenset[int]:
        with self._db.read() as connection:
            return frozenset(id for part in self._parts for id in connection.scalars(sa.select(part.table.c.vector_id)))

    def __len__(self) -> int:
        with self._db.read() as connection:
            counts = (connection.scalar(sa.select(sa.func.count()).select_from(part.table)) for part in self._parts)
            return sum(int(count or 0) for count in counts)

    def follow(self, _documents: DocumentStore) -> None:
        """Copy the vectors of chunks that were stored since the tables were last filled; do nothing if read-only."""
        for part in self._parts:
            filled = 0 if self._db.read_only else BATCH
            while filled == BATCH:
                with self._db.write() as connection:
                    filled = _fill(connection, part)

    def take(
        self, documents: DocumentStore, _added: Sequence[int], _vectors: Vectors, _removed: Collection[int]
    ) -> None:
        """Run `follow`: the database has the added chunks, and has deleted the rows of removed ones."""
        self.follow(documents)

    def compact(self) -> None:
        """Do nothing: no search finds a deleted row, and PostgreSQL's vacuum frees its space."""

    def save(self, _path: Path) -> None:
        """Do nothing: changes are in the database when their method returns."""

    def find(self, documents: DocumentStore, vector: Vectors, k: int, where: Filter | None) -> SearchResult:
        """Return the k ids with the largest inner products among the chunks that pass the filter, and these products.

        There are fewer if fewer chunks pass.

        Raises ConfigError when k < 1 or the vector does not fit.
        """
        check_least("k", k, 1)
        if np.shape(vector) != (self.dimension,) or not np.isfinite(vector).all():
            raise ConfigError(f"the vector has shape {np.shape(vector)}; it needs {self.dimension} finite numbers")
        found = [row for part in self._parts for row in self._nearest(part, vector, k, documents.passing(where))]
        ids, scores = zip(*found, strict=True) if found else ((), ())
        best = ranked(np.array(ids, np.int64), np.array(scores, np.float32))
        return SearchResult(best.ids[:k], best.scores[:k])

    def _nearest(
        self, part: _Part, vector: Vectors, k: int, passing: sa.Select[Any] | None
    ) -> Sequence[sa.Row[tuple[int, float]]]:
        table, column = part.table, part.table.c.embedding
        negative: sa.ColumnElement[float] = column.op(f'OPERATOR("{self._schema}".<#>)', return_type=Double())(
            sa.cast(sa.literal(_as_text(vector), sa.Text), column.type)
        )
        query = sa.select(table.c.vector_id, -negative).order_by(negative).limit(k)
        if passing is not None:
            if part.source is windows:
                passing = sa.select(windows.c.vector_id).where(windows.c.chunk.in_(passing))
            query = query.where(table.c.vector_id.in_(passing))
        with self._db.read() as connection:
            width = min(MOST_EF_SEARCH, max(HNSW_EF_SEARCH, 2 * k))
            connection.execute(sa.text(f"SET LOCAL hnsw.ef_search = {width}"))
            found = connection.execute(query).all()
            if len(found) < k:  # a narrow filter, or a k beyond HNSW's search: scan every row
                connection.execute(sa.text("SET LOCAL enable_indexscan = off"))
                found = connection.execute(query).all()
        return found

    def vectors_present(self, ids: Ids) -> tuple[Ids, Vectors]:
        """Return the indices of `ids` that are still stored, and their vectors."""
        found = self._documents.vectors_by_ids(ids, dimension=self.dimension)
        rows = np.flatnonzero(np.isin(ids, found.ids))
        return rows, found.vectors[np.searchsorted(found.ids, ids[rows])]

    def agrees(self, batch: VectorBatch) -> bool:
        """Return whether the tables hold these vectors."""
        wanted = batch.ids.tolist()
        tables = [part.table.c for part in self._parts]
        queries = [sa.select(t.vector_id, sa.cast(t.embedding, sa.Text)).where(t.vector_id.in_(wanted)) for t in tables]
        with self._db.read() as connection:
            found = connection.execute(sa.union_all(*queries).order_by("vector_id")).all()
        if [id for id, _ in found] != wanted:
            return False
        return np.array_equal(np.array([json.loads(row) for _, row in found], np.float32), batch.vectors)

    def clear(self) -> None:
        """Empty the tables, to be filled again."""
        with self._db.write() as connection:
            for part in self._parts:
                _reset(connection, part)
                connection.execute(sa.delete(part.table))

    def _prepare(self, part: _Part) -> None:
        """Make the table if it does not exist. Raises ConfigError for a table of another dimension."""
        table = part.table.name
        query = sa.text(
            "SELECT atttypmod FROM pg_attribute WHERE attrelid = to_regclass(:name) AND attname = 'embedding'"
        )
        with self._db.read() as connection:
            dimension = connection.scalar(query, {"name": table})
        if dimension == self.dimension:
            return
        if dimension is not None:
            raise ConfigError(
                f"{self._db.where}: table {table} holds vectors of {dimension} numbers, the embedder makes "
                f"{self.dimension}; drop the table (DROP TABLE {table}): it is filled again from the documents"
            )
        if self._db.read_only:
            raise StoreNotFoundError(f"{self._db.where}: no table {table}; open the store once for writing to make it")
        with self._db.write() as connection:
            _take_turns(connection)
            if not sa.inspect(connection).has_table(table):
                self._create(connection, part)

    def _create(self, connection: sa.Connection, part: _Part) -> None:
        table = part.table.name
        part.table.create(connection)
        _reset(connection, part)
        has_graphs = connection.scalar(sa.text("SELECT 1 FROM pg_am WHERE amname = 'hnsw'"))  # since pgvector 0.5
        if has_graphs and self.dimension <= MOST_GRAPH_DIMENSION:
            connection.execute(sa.text(
                f'CREATE INDEX {table}_hnsw ON {table} USING hnsw (embedding "{self._schema}".vector_ip_ops) '
                f"WITH (m = {HNSW_NEIGHBOURS}, ef_construction = {HNSW_EF_CONSTRUCTION})"
            ))  # fmt: skip


class _Part(NamedTuple):
    """A table of vectors.

    source:   the table that its vectors are copied from
    searched: condition on the rows of `source` whose vectors it holds
    filled:   name of its counter; see FILLED
    """

    table: sa.Table
    source: sa.Table
    searched: sa.ColumnElement[bool]
    filled: str


def _fill(connection: sa.Connection, part: _Part) -> int:
    """Copy up to BATCH vectors, and return their number.

    Ids rise from commit to commit, so no vector is ever missing below the counter. The counter's row is locked, so
    processes take turns, and source rows are locked against deletion until their vectors are copied.
    """
    counter, id = sa.update(counters).where(counters.c.name == part.filled), part.source.c.vector_id
    last = int(connection.scalar(counter.values(value=counters.c.value).returning(counters.c.value)) or 0)
    newest = int(connection.scalar(sa.select(sa.func.max(id))) or 0)
    query = sa.select(id, part.source.c.embedding).where(id > last, id <= newest, part.searched)
    locked = query.order_by(id).limit(BATCH).with_for_update(read=True, key_share=True)
    found = connection.execute(locked).mappings().all()
    if found:
        batch = vector_batch(found)
        rows = zip(batch.ids.tolist(), map(_as_text, batch.vectors), strict=True)
        connection.execute(sa.insert(part.table), [{"vector_id": id, "embedding": row} for id, row in rows])
    if newest > last:
        connection.execute(counter.values(value=int(batch.ids[-1]) if len(found) == BATCH else newest))
    return len(found)


def _reset(connection: sa.Connection, part: _Part) -> None:
    """Reset the counter to 0, and lock it against other processes."""
    connection.execute(sa.delete(counters).where(counters.c.name == part.filled))
    connection.execute(sa.insert(counters), {"name": part.filled, "value": 0})


class _Vector(UserDefinedType[str]):
    """pgvector's type in the schema of its extension; values are text."""

    cache_ok = True

    def __init__(self, schema: str, dimension: int) -> None:
        self.schema = schema
        self.dimension = dimension

    def get_col_spec(self, **_options: Any) -> str:
        return f'"{self.schema}".vector({self.dimension})'


def _table(name: str, source: sa.Table, kind: _Vector) -> sa.Table:
    owner = sa.ForeignKey(source.c.vector_id, ondelete="CASCADE")
    key = sa.Column("vector_id", sa.BigInteger, owner, primary_key=True, autoincrement=False)
    return sa.Table(name, sa.MetaData(), key, sa.Column("embedding", kind, nullable=False))


def _as_text(vector: Vectors) -> str:
    return f"[{','.join(map(repr, vector.tolist()))}]"


def _extension(database: Database) -> str:
    """Return the schema of pgvector's extension, which is created if allowed."""
    if (schema := _schema_of_extension(database)) is not None:
        return schema
    if database.read_only:
        raise StoreNotFoundError(f"{database.where}: no extension {EXTENSION!r}; open the store once for writing")
    with database.read() as connection:
        query = sa.text("SELECT 1 FROM pg_available_extensions WHERE name = :name")
        if not connection.scalar(query, {"name": EXTENSION}):
            raise ConfigError(
                f"{database.where}: the server has no extension {EXTENSION!r}; install pgvector there (Debian: "
                "postgresql-VERSION-pgvector), or choose index flat or hnsw"
            )
    try:
        with database.write() as connection:
            _take_turns(connection)
            connection.execute(sa.text(f"CREATE EXTENSION IF NOT EXISTS {EXTENSION}"))
    except StoreReadOnlyError as error:
        raise ConfigError(
            f"{database.where}: this role may not create extension {EXTENSION!r}; have an administrator run CREATE "
            f"EXTENSION {EXTENSION} in the database, or choose index flat or hnsw ({error})"
        ) from error
    return str(_schema_of_extension(database))


def _schema_of_extension(database: Database) -> str | None:
    query = "SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = :name"
    with database.read() as connection:
        found = connection.scalar(sa.text(query), {"name": EXTENSION})
    return None if found is None else str(found)


def _take_turns(connection: sa.Connection) -> None:
    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
