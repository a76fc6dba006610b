"""Counters of a document store; see `schema.counters`."""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from ragcache.store.schema import counters


def advance(connection: Connection, name: str, step: int = 1) -> int:
    """Raise a counter and return it. The first statement of every write: it makes other writers wait (see schema)."""
    connection.execute(update(counters).where(counters.c.name == name).values(value=counters.c.value + step))
    return current(connection, name)


def current(connection: Connection, name: str) -> int:
    """The counter's value."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == name)).scalar_one())
