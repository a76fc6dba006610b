"""Databases and blocks for the store's tests."""

from collections.abc import Iterator

import pytest
from kit.makers import databases

from ragcache.store.documents import DocumentStore

url = databases()


@pytest.fixture
def store(url: str) -> Iterator[DocumentStore]:
    with DocumentStore.open(url) as store:
        yield store
