"""Databases and blocks for the store's tests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

POSTGRES = "RAGCACHE_TEST_POSTGRES"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database: every test that takes it runs on SQLite, and on PostgreSQL where a server is given."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.sqlite3'}"
        return
    if POSTGRES not in os.environ:
        pytest.skip(f"no PostgreSQL server in {POSTGRES}; run scripts/with-postgres pytest ...")
    yield from _postgres_schema(os.environ[POSTGRES])


def _postgres_schema(server: str) -> Iterator[str]:
    """A schema of its own on a running server, as a URL whose connections find their tables there."""
    pytest.importorskip("psycopg", reason="needs ragcache-kv[postgres]")
    name = f"test_{secrets.token_hex(8)}"
    engine = create_engine(make_url(server).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    try:
        url = make_url(server).update_query_dict({"options": f"-csearch_path={name}"})
        yield url.render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
        engine.dispose()
