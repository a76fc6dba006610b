"""Databases and blocks for the store's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import postgres_schema

from ragcache.store.documents import DocumentStore


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database: every test that takes it runs on SQLite, and on PostgreSQL where a server is given."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.sqlite3'}"
        return
    yield from postgres_schema()


@pytest.fixture
def store(url: str) -> Iterator[DocumentStore]:
    with DocumentStore.open(url) as store:
        yield store
