"""Handles that a change of the documents leaves without a chunk: recorded in the same transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ragcache.store.schema import chunks, garbage, neighbours


def discard_chunks(connection: sa.Connection, collection: str, document_ids: Sequence[str]) -> None:
    """Delete the chunks of these documents of a collection, and record their KV as garbage.

    KV that was computed with any of them as a neighbour becomes garbage, too.
    """
    discard_read_behind(connection, collection, document_ids)
    own = sa.and_(chunks.c.collection == collection, chunks.c.document_id.in_(document_ids))
    to_garbage(connection, own)
    connection.execute(sa.delete(chunks).where(own))


def discard_read_behind(connection: sa.Connection, collection: str, document_ids: Sequence[str]) -> None:
    """Discard the KV of chunks that have a neighbour in these documents, since the neighbour's text can be recovered
    from it. The chunks lose all of their recorded neighbours, which are then found again."""
    own, other = chunks.alias(), neighbours.alias()  # without aliases SQL would refer to the tables being changed
    gone = sa.select(own.c.vector_id).where(own.c.collection == collection, own.c.document_id.in_(document_ids))
    readers = sa.select(other.c.vector_id).where(other.c.neighbour.in_(gone))
    to_garbage(connection, chunks.c.vector_id.in_(readers))
    connection.execute(sa.update(chunks).where(chunks.c.vector_id.in_(readers)).values(handle=None))
    connection.execute(
        sa.delete(neighbours).where(neighbours.c.vector_id.in_(gone) | neighbours.c.vector_id.in_(readers))
    )


def to_garbage(connection: sa.Connection, condition: Any) -> None:
    """Add the handles of these chunks to the garbage; `rescue` removes those that are still in use."""
    known = sa.exists().where(garbage.c.handle == chunks.c.handle)
    handles = sa.select(chunks.c.handle, sa.literal(time.time())).where(condition, chunks.c.handle.is_not(None), ~known)
    connection.execute(sa.insert(garbage).from_select(["handle", "created_at"], handles.distinct()))


def rescue(connection: sa.Connection) -> None:
    """Take handles that a chunk refers to out of the garbage. Call it at the end of a change."""
    connection.execute(sa.delete(garbage).where(is_referenced()))


def is_referenced() -> Any:
    return sa.exists().where(chunks.c.handle == garbage.c.handle)
