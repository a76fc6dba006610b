"""The tables of a document store, and its counters.

Names carry a prefix because a PostgreSQL database may hold other tables. Times are Unix seconds, because the two
databases disagree on the type of a date. Text sorts by code point on both.

When anything here changes, raise SCHEMA_VERSION: a store of another version is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from ragcache.errors import DatabaseMismatchError, SchemaVersionError

SCHEMA_VERSION = 2
DEFAULT = "default"
"""The collection of documents that name none."""
PREFIX = "ragcache_"


metadata_obj = sa.MetaData()
_Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_Json = sa.JSON().with_variant(JSONB(), "postgresql")

properties = sa.Table(
    PREFIX + "properties",
    metadata_obj,
    sa.Column("name", _Text, primary_key=True),
    sa.Column("value", _Text, nullable=False),  # JSON, stored as text so that it reads back unchanged
)

# Numbers that only ever rise: `generation` (commits that changed documents) and `vector_id` (the last id assigned).
# Every write transaction updates a row here first, which on PostgreSQL makes writers wait for each other.
counters = sa.Table(
    PREFIX + "counters",
    metadata_obj,
    sa.Column("name", _Text, primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)

# A secret salts the KV of a collection's documents; "": it has no salt. `default`, which has none, needs no row.
collections = sa.Table(
    PREFIX + "collections",
    metadata_obj,
    sa.Column("name", _Text, primary_key=True),
    sa.Column("secret", _Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

documents = sa.Table(
    PREFIX + "documents",
    metadata_obj,
    sa.Column("collection", _Text, primary_key=True),
    sa.Column("id", _Text, primary_key=True),
    sa.Column("source", _Text, nullable=False),
    sa.Column("title", _Text, nullable=False),
    sa.Column("content_hash", _Text, nullable=False),
    sa.Column("metadata", _Json, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Column("file", _Text, nullable=False),  # `SourceFile.place` of the file that it was read from; "": none
)

chunks = sa.Table(
    PREFIX + "chunks",
    metadata_obj,
    sa.Column("collection", _Text, primary_key=True),
    sa.Column("id", _Text, primary_key=True),
    sa.Column("document_id", _Text, nullable=False),
    sa.Column("ordinal", sa.Integer, nullable=False),
    sa.Column("text", _Text, nullable=False),
    sa.Column("token_ids", sa.LargeBinary, nullable=False),  # int32, little endian
    sa.Column("num_tokens", sa.Integer, nullable=False),
    sa.Column("metadata", _Json, nullable=False),  # the document's, overridden by the chunk's own
    sa.Column("embedding", sa.LargeBinary, nullable=False),  # float32, little endian
    sa.Column("vector_id", sa.BigInteger, nullable=False, unique=True),
    sa.Column("handle", _Text, nullable=True, index=True),  # null: its KV is not computed yet
    sa.Column("created_at", sa.Double, nullable=False),
    sa.ForeignKeyConstraint(
        ["collection", "document_id"], [documents.c.collection, documents.c.id], ondelete="CASCADE"
    ),
    sa.Index(PREFIX + "chunks_of", "collection", "document_id"),
)

# Vectors of the windows of chunks that are longer than the embedder reads. The chunk's own embedding is their mean.
windows = sa.Table(
    PREFIX + "windows",
    metadata_obj,
    sa.Column("vector_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column(
        "chunk", sa.BigInteger, sa.ForeignKey(chunks.c.vector_id, ondelete="CASCADE"), nullable=False, index=True
    ),
    sa.Column("embedding", sa.LargeBinary, nullable=False),
)

# Every vector that is searched, and the vector id of its chunk: a chunk's windows, or else its own embedding.
has_windows = sa.exists().where(windows.c.chunk == chunks.c.vector_id)
searched = sa.union_all(
    sa.select(chunks.c.vector_id, chunks.c.vector_id.label("chunk"), chunks.c.embedding).where(~has_windows),
    sa.select(windows.c.vector_id, windows.c.chunk, windows.c.embedding),
).subquery("searched")

# Handles that no chunk refers to and whose KV bytes have yet to be deleted.
garbage = sa.Table(
    PREFIX + "garbage",
    metadata_obj,
    sa.Column("handle", _Text, primary_key=True),
    sa.Column("created_at", sa.Double, nullable=False),
)

# The chunks that precede each chunk when its KV is computed. Both columns hold vector ids, which are never reused.
neighbours = sa.Table(
    PREFIX + "neighbours",
    metadata_obj,
    sa.Column("vector_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),  # 0: the nearest
    sa.Column("neighbour", sa.BigInteger, nullable=False, index=True),
    sa.Column("score", sa.Double, nullable=False),  # inner product of the two embeddings, or 0
)


# Create and check a database's schema.


# An arbitrary number, which every process has to use.
_POSTGRES_LOCK = 7_231_554_190


def prepare(connection: sa.Connection, where: str, *, create: bool = True) -> None:
    """Create the schema if the database has none, in the transaction of `connection`.

    Raises:
        SchemaVersionError: the store was made by another version, or the SQLite file belongs to another program.
        DatabaseMismatchError: there is no store, and `create` is false.
    """
    if connection.dialect.name == "postgresql":  # SQLite's write transaction excludes other writers anyway
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _POSTGRES_LOCK})
    if has_store(connection, where):
        return
    if not create:
        raise DatabaseMismatchError(f"{where}: holds no ragcache store; name the database that has the documents")
    _create(connection, where)


def check(connection: sa.Connection, where: str) -> None:
    """Raise SchemaVersionError if the database has no store, or a store of another version."""
    if not has_store(connection, where):
        raise SchemaVersionError(f"{where}: holds no ragcache store; check the name, or open it for writing")


def has_store(connection: sa.Connection, where: str) -> bool:
    """Return whether the database has a store. Raises SchemaVersionError if another version made it."""
    if not sa.inspect(connection).has_table(properties.name):
        return False
    query = sa.select(properties.c.value).where(properties.c.name == "schema")
    value = connection.execute(query).scalar_one_or_none()
    if value is None or int(json.loads(value)) < SCHEMA_VERSION:
        other = " --database NEW" if connection.dialect.name == "postgresql" else ""
        raise SchemaVersionError(
            f"{where}: this store was made before ragcache 0.1, which does not read it; ingest its documents into a "
            f"new one: ragcache ingest FOLDER --store NEW{other}"
        )
    if int(json.loads(value)) > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where}: schema version {value} is newer than this version of ragcache's {SCHEMA_VERSION}; "
            "use the version of ragcache that wrote it, or a later one"
        )
    return True


def _create(connection: sa.Connection, where: str) -> None:
    names = sa.inspect(connection).get_table_names()
    if names and connection.dialect.name == "sqlite":
        raise SchemaVersionError(f"{where}: a database with other tables ({', '.join(names)}); name another file")
    metadata_obj.create_all(connection)
    connection.execute(sa.insert(counters), [{"name": "generation", "value": 0}, {"name": "vector_id", "value": 0}])
    connection.execute(sa.insert(properties), {"name": "schema", "value": json.dumps(SCHEMA_VERSION)})


def advance(connection: sa.Connection, name: str, step: int = 1) -> int:
    """Increase a counter by `step` and return its new value.

    Every write calls this first, with step 0 if no counter changes, because it makes other writers wait; see
    `counters`.
    """
    connection.execute(sa.update(counters).where(counters.c.name == name).values(value=counters.c.value + step))
    return current(connection, name)


def current(connection: sa.Connection, name: str) -> int:
    """Return the counter's value."""
    return int(connection.execute(sa.select(counters.c.value).where(counters.c.name == name)).scalar_one())


def chunks_with(connection: sa.Connection, handles: Sequence[str]) -> int:
    """Count the chunks that have any of these handles (at most a thousand handles)."""
    query = sa.select(sa.func.count()).select_from(chunks).where(chunks.c.handle.in_(handles))
    return int(connection.execute(query).scalar_one())
