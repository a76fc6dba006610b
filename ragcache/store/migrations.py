"""Bringing a database to today's schema."""

from __future__ import annotations

import json
from collections.abc import Callable

from sqlalchemy import Connection, insert, inspect, select, text, update

from ragcache.errors import DatabaseMismatchError, SchemaVersionError
from ragcache.store import schema

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


# MIGRATIONS[n] brings version n to n + 1, with SQL of its own: the tables in `schema` are today's, not those of then.
MIGRATIONS: dict[int, Migration] = {1: _count_uses, 2: _remember_files, 3: _remember_neighbours}

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
    for step in range(version, schema.SCHEMA_VERSION):
        MIGRATIONS[step](connection)
        _record(connection, step + 1)


def check(connection: Connection, where: str) -> None:
    """For a reader, who may not migrate. Raises SchemaVersionError when the schema is not today's."""
    version = stored_version(connection)
    if version is None:
        raise SchemaVersionError(f"{where}: holds no ragcache store; check the name, or open it for writing")
    _refuse_newer(version, where)
    if version < schema.SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where}: schema version {version} is older than this version of ragcache's {schema.SCHEMA_VERSION}; "
            "open it once for writing, which brings it up to date"
        )


def stored_version(connection: Connection) -> int | None:
    """The schema version of the database; None where there is no store in it."""
    if not inspect(connection).has_table(schema.properties.name):
        return None
    query = select(schema.properties.c.value).where(schema.properties.c.name == "schema_version")
    value = connection.execute(query).scalar_one_or_none()
    return None if value is None else int(json.loads(value))


def _refuse_newer(version: int, where: str) -> None:
    if version > schema.SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where}: schema version {version} is newer than this version of ragcache's {schema.SCHEMA_VERSION}; "
            "use the version of ragcache that wrote it, or a later one"
        )


def _create(connection: Connection, where: str) -> None:
    names = inspect(connection).get_table_names()
    if names and connection.dialect.name == "sqlite":
        raise SchemaVersionError(f"{where}: a database with other tables ({', '.join(names)}); name another file")
    schema.metadata_obj.create_all(connection)
    connection.execute(insert(schema.counters), [{"name": "generation", "value": 0}, {"name": "vector_id", "value": 0}])
    version = json.dumps(schema.SCHEMA_VERSION)
    connection.execute(insert(schema.properties), {"name": "schema_version", "value": version})


def _record(connection: Connection, version: int) -> None:
    properties = schema.properties
    statement = update(properties).where(properties.c.name == "schema_version").values(value=json.dumps(version))
    connection.execute(statement)
