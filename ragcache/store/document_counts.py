"""Counters of a document store (see `schema.counters`), and counts of its chunks."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from ragcache.store.schema import chunks, counters


def advance(connection: sa.Connection, name: str, step: int = 1) -> int:
    """Increase a counter by `step` and return its new value.

    Every write calls this first, with step 0 if no counter changes, because it makes other writers wait; see
    `schema.counters`.
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
