"""Schemas on the PostgreSQL server that scripts/with-postgres starts."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text

POSTGRES = "RAGCACHE_TEST_POSTGRES"


def postgres_schema() -> Iterator[str]:
    """A schema of its own on a running server, as a URL whose connections find their tables there."""
    name = f"test_{secrets.token_hex(8)}"
    with administrator() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    try:
        url = make_url(os.environ[POSTGRES]).update_query_dict({"options": f"-csearch_path={name}"})
        yield url.render_as_string(hide_password=False)
    finally:
        with administrator() as connection:
            connection.execute(text(f"DROP SCHEMA {name} CASCADE"))


def pgvector_schema() -> Iterator[str]:
    """The same on a server with pgvector. The extension is a database's: it must not go with one test's schema."""
    with administrator() as connection:
        if not connection.scalar(text("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'")):
            pytest.skip("the PostgreSQL server has no pgvector; pip install pgserver")
        connection.execute(text("SELECT pg_advisory_lock(1)"))  # until the connection ends
        connection.execute(text("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public"))
    yield from postgres_schema()


def engine_of(url: str) -> Engine:
    """Return an engine on a store's database without the store's code."""
    parsed = make_url(url)
    return create_engine(
        parsed.set(drivername="postgresql+psycopg") if parsed.get_backend_name() == "postgresql" else url
    )


@contextmanager
def administrator() -> Iterator[Connection]:
    """A connection of the server's own administrator, who commits every statement."""
    if POSTGRES not in os.environ:
        pytest.skip(f"no PostgreSQL server in {POSTGRES}; run scripts/with-postgres pytest ...")
    pytest.importorskip("psycopg", reason="needs ragcache-kv[postgres]")
    url = make_url(os.environ[POSTGRES]).set(drivername="postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()
