"""The tables of a document store.

Names carry a prefix because a PostgreSQL database may hold other tables. Times are Unix seconds: the two databases
disagree on what a date is. Text sorts by code point on both.

When anything here changes, raise SCHEMA_VERSION and add the step to `migrations.MIGRATIONS`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    exists,
    func,
    insert,
    inspect,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from ragcache.errors import DatabaseMismatchError, SchemaVersionError

SCHEMA_VERSION = 5
PREFIX = "ragcache_"

# Letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese. An index of words holds
# what they made of its texts: other letters here take another name of the index.
LETTERS = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    r"\U00020000-\U0003ffff"
)
MARKS = r"\u0300-\u036f"
PUNCTUATION = (
    r"\u0021-\u002f\u003a-\u0040\u005b-\u0060\u007b-\u00a9\u00ab-\u00b4\u00b6-\u00b9\u00bb-\u00bf"
    r"\u2010-\u206f\u3000-\u303f"
)
_LETTER, _MARK, _PUNCTUATION = (re.compile(f"([{found}])") for found in (LETTERS, MARKS, PUNCTUATION))
SPACED = PREFIX + "spaced"
"""Name of `spaced` in SQL."""

metadata_obj = MetaData()
_Text = Text().with_variant(Text(collation="C"), "postgresql")
_Json = JSON().with_variant(JSONB(), "postgresql")

properties = Table(
    PREFIX + "properties",
    metadata_obj,
    Column("name", _Text, primary_key=True),
    Column("value", _Text, nullable=False),  # JSON; text, so that it reads back as it was written
)

# Numbers that only ever rise: `generation` (commits that changed documents) and `vector_id` (the last one given out).
# Every write transaction updates a row here first, which on PostgreSQL makes writers wait for each other.
counters = Table(
    PREFIX + "counters",
    metadata_obj,
    Column("name", _Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

documents = Table(
    PREFIX + "documents",
    metadata_obj,
    Column("id", _Text, primary_key=True),
    Column("source", _Text, nullable=False),
    Column("title", _Text, nullable=False),
    Column("content_hash", _Text, nullable=False),
    Column("metadata", _Json, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    # Where the file was found that it was read from (`SourceFile.place`); "": none; null: an older version stored it.
    Column("file", _Text, nullable=True),
)

chunks = Table(
    PREFIX + "chunks",
    metadata_obj,
    Column("id", _Text, primary_key=True),
    Column("document_id", _Text, ForeignKey(documents.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("ordinal", Integer, nullable=False),
    Column("text", _Text, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),  # int32, little endian
    Column("num_tokens", Integer, nullable=False),
    Column("metadata", _Json, nullable=False),  # the document's with the chunk's own on top
    Column("embedding", LargeBinary, nullable=False),  # float32, little endian
    Column("vector_id", BigInteger, nullable=False, unique=True),
    Column("handle", _Text, nullable=True, index=True),  # null: its KV was not computed yet
    Column("created_at", Double, nullable=False),
    # Nothing reads it: schemas from version 2 on have it.
    Column("uses_left", Integer, nullable=False, server_default="0"),
)

# Vectors of the windows of chunks that are longer than the embedder reads. The chunk's own embedding is their mean.
windows = Table(
    PREFIX + "windows",
    metadata_obj,
    Column("vector_id", BigInteger, primary_key=True, autoincrement=False),
    Column("chunk", BigInteger, ForeignKey(chunks.c.vector_id, ondelete="CASCADE"), nullable=False, index=True),
    Column("embedding", LargeBinary, nullable=False),
)

# Every vector that is searched, and the vector id of its chunk: a chunk's windows, or else its own embedding.
has_windows = exists().where(windows.c.chunk == chunks.c.vector_id)
searched = union_all(
    select(chunks.c.vector_id, chunks.c.vector_id.label("chunk"), chunks.c.embedding).where(~has_windows),
    select(windows.c.vector_id, windows.c.chunk, windows.c.embedding),
).subquery("searched")

# Handles that no chunk refers to any more, and whose KV bytes are still to be deleted.
garbage = Table(
    PREFIX + "garbage",
    metadata_obj,
    Column("handle", _Text, primary_key=True),
    Column("created_at", Double, nullable=False),
)

# What each chunk's KV is read behind, where the store has neighbours: names are vector ids, which are never reused.
neighbours = Table(
    PREFIX + "neighbours",
    metadata_obj,
    Column("vector_id", BigInteger, primary_key=True, autoincrement=False),
    Column("place", Integer, primary_key=True, autoincrement=False),  # 0: the nearest
    Column("neighbour", BigInteger, nullable=False, index=True),
    Column("score", Double, nullable=False),  # inner product of the two embeddings, or 0
)


# Bringing a database to today's schema.


Migration = Callable[[Connection], None]


def _count_uses(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE ragcache_chunks ADD COLUMN uses_left INTEGER NOT NULL DEFAULT 0"))


def _remember_files(connection: Connection) -> None:
    collation = ' COLLATE "C"' if connection.dialect.name == "postgresql" else ""
    connection.execute(text(f"ALTER TABLE ragcache_documents ADD COLUMN file TEXT{collation}"))


def _remember_neighbours(connection: Connection) -> None:
    double = "DOUBLE PRECISION" if connection.dialect.name == "postgresql" else "DOUBLE"
    columns = f"vector_id BIGINT NOT NULL, place INTEGER NOT NULL, neighbour BIGINT NOT NULL, score {double} NOT NULL"
    connection.execute(text(f"CREATE TABLE ragcache_neighbours ({columns}, PRIMARY KEY (vector_id, place))"))
    connection.execute(text("CREATE INDEX ix_ragcache_neighbours_neighbour ON ragcache_neighbours (neighbour)"))


def _remember_windows(connection: Connection) -> None:
    data = "BYTEA" if connection.dialect.name == "postgresql" else "BLOB"
    columns = f"vector_id BIGINT NOT NULL, chunk BIGINT NOT NULL, embedding {data} NOT NULL, PRIMARY KEY (vector_id)"
    owner = "FOREIGN KEY (chunk) REFERENCES ragcache_chunks (vector_id) ON DELETE CASCADE"
    connection.execute(text(f"CREATE TABLE ragcache_windows ({columns}, {owner})"))
    connection.execute(text("CREATE INDEX ix_ragcache_windows_chunk ON ragcache_windows (chunk)"))


# MIGRATIONS[n] brings version n to n + 1, with SQL of its own: the tables in `schema` are today's, not those of then.
MIGRATIONS: dict[int, Migration] = {
    1: _count_uses,
    2: _remember_files,
    3: _remember_neighbours,
    4: _remember_windows,
}

# Any number will do, as long as every process takes the same.
_POSTGRES_LOCK = 7_231_554_190


def prepare(connection: Connection, where: str, *, create: bool = True) -> None:
    """Create the schema, or bring an older one up to date, in the transaction of `connection`.

    Raises SchemaVersionError for a newer schema, and for a SQLite file that belongs to another program;
    DatabaseMismatchError where there is no schema and none is to be made.
    """
    if connection.dialect.name == "postgresql":  # SQLite's write transaction excludes other writers anyway
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _POSTGRES_LOCK})
    version = stored_version(connection)
    if version is None and not create:
        raise DatabaseMismatchError(f"{where}: holds no ragcache store; name the database that has the documents")
    if version is None:
        _create(connection, where)
        return
    _refuse_newer(version, where)
    for step in range(version, SCHEMA_VERSION):
        MIGRATIONS[step](connection)
        recorded = update(properties).where(properties.c.name == "schema_version")
        connection.execute(recorded.values(value=json.dumps(step + 1)))


def check(connection: Connection, where: str) -> None:
    """For a reader, who may not migrate. Raises SchemaVersionError when the schema is not today's."""
    version = stored_version(connection)
    if version is None:
        raise SchemaVersionError(f"{where}: holds no ragcache store; check the name, or open it for writing")
    _refuse_newer(version, where)
    if version < SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where}: schema version {version} is older than this version of ragcache's {SCHEMA_VERSION}; "
            "open it once for writing, which brings it up to date"
        )


def stored_version(connection: Connection) -> int | None:
    """The schema version of the database; None where there is no store in it."""
    if not inspect(connection).has_table(properties.name):
        return None
    query = select(properties.c.value).where(properties.c.name == "schema_version")
    value = connection.execute(query).scalar_one_or_none()
    return None if value is None else int(json.loads(value))


def _refuse_newer(version: int, where: str) -> None:
    if version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where}: schema version {version} is newer than this version of ragcache's {SCHEMA_VERSION}; "
            "use the version of ragcache that wrote it, or a later one"
        )


def _create(connection: Connection, where: str) -> None:
    names = inspect(connection).get_table_names()
    if names and connection.dialect.name == "sqlite":
        raise SchemaVersionError(f"{where}: a database with other tables ({', '.join(names)}); name another file")
    metadata_obj.create_all(connection)
    connection.execute(insert(counters), [{"name": "generation", "value": 0}, {"name": "vector_id", "value": 0}])
    version = json.dumps(SCHEMA_VERSION)
    connection.execute(insert(properties), {"name": "schema_version", "value": version})


# Counters of a document store (see `schema.counters`), and counts of its chunks.


def advance(connection: Connection, name: str, step: int = 1) -> int:
    """Raise a counter and return it. The first statement of every write: it makes other writers wait (see schema)."""
    connection.execute(update(counters).where(counters.c.name == name).values(value=counters.c.value + step))
    return current(connection, name)


def current(connection: Connection, name: str) -> int:
    """The counter's value."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == name)).scalar_one())


def chunks_with(connection: Connection, handles: Sequence[str]) -> int:
    """How many chunks have one of these handles, at most a thousand."""
    query = select(func.count()).select_from(chunks).where(chunks.c.handle.in_(handles))
    return int(connection.execute(query).scalar_one())


def cut(text: str) -> str:
    """Write a text as the index of words and its questions have it: letters of any width alike (NFKC) and without
    accents, and a space in place of each punctuation mark, by which databases' own parsers would join words."""
    bare = _MARK.sub("", unicodedata.normalize("NFKD", text))
    return _PUNCTUATION.sub(" ", unicodedata.normalize("NFKC", bare))


def spaced(text: str) -> str:
    """`cut`, with a space around each letter of a script that puts none between words."""
    return _LETTER.sub(r" \1 ", cut(text))
