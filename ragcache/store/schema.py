"""The tables of a document store.

Names carry a prefix because a PostgreSQL database may hold other tables. Times are Unix seconds: the two databases
disagree on what a date is. Text sorts by code point on both.

When anything here changes, raise SCHEMA_VERSION and add the step to `migrations.MIGRATIONS`.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Double, ForeignKey, Integer, LargeBinary, MetaData, Table, Text
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA_VERSION = 4
PREFIX = "ragcache_"

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
    # The file that it was read from, by its id (see `ingest.readers`); "": none; null: an older version stored it.
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
    # kv="hot": times that it is still to be retrieved before its KV is kept.
    Column("uses_left", Integer, nullable=False, server_default="0"),
)

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
