"""Handles that a change of the documents leaves without a chunk: noted in the change's own transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, insert, literal, select

from ragcache.store.properties import HELD_OVER_ALL
from ragcache.store.schema import chunks, garbage, properties


def discard_chunks(connection: Connection, document_ids: Sequence[str]) -> None:
    """What was made over all documents goes with any of them."""
    discard_made_over_all(connection)
    to_garbage(connection, chunks.c.document_id.in_(document_ids))
    connection.execute(delete(chunks).where(chunks.c.document_id.in_(document_ids)))


def discard_made_over_all(connection: Connection) -> None:
    own = properties.c.name.startswith(HELD_OVER_ALL)
    handles = {name.removeprefix(HELD_OVER_ALL) for name in connection.scalars(select(properties.c.name).where(own))}
    if not handles:
        return
    known = set(connection.scalars(select(garbage.c.handle).where(garbage.c.handle.in_(handles))))
    for handle in handles - known:
        connection.execute(insert(garbage), {"handle": handle, "created_at": time.time()})
    connection.execute(delete(properties).where(own))


def to_garbage(connection: Connection, condition: Any) -> None:
    """Put the handles of these chunks into the garbage; `_rescue` takes back those that are still in use."""
    known = exists().where(garbage.c.handle == chunks.c.handle)
    handles = select(chunks.c.handle, literal(time.time())).where(condition, chunks.c.handle.is_not(None), ~known)
    connection.execute(insert(garbage).from_select(["handle", "created_at"], handles.distinct()))


def rescue(connection: Connection) -> None:
    connection.execute(delete(garbage).where(is_referenced()))


def is_referenced() -> Any:
    return exists().where(chunks.c.handle == garbage.c.handle)
