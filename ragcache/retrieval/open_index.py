"""Open the index of a store, of whatever kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ragcache.errors import DamagedIndexError, check_choice
from ragcache.plugins import load
from ragcache.retrieval.vector_index import KINDS, SearchIndex, TableIndex, VectorIndex
from ragcache.store.documents import DocumentStore

log = logging.getLogger(__name__)
INDEXES: dict[str, Callable[..., TableIndex] | str] = {"pgvector": "ragcache_postgres.pgvector:PgVectorIndex"}
"""Kinds of index that the documents' database holds. Called with the `Database`, the dimension, `embedder=` and
`stored=`, as a `VectorIndex` is."""


def open_index(documents: DocumentStore, path: Path, kind: str, embedder: str, dimension: int) -> SearchIndex:
    """The index saved at `path`, or an empty one where the file is absent, damaged, of another kind or embedder; kind
    "pgvector" is a table of the database. Not yet brought up to date. Raises ConfigError, StoreNotFoundError."""
    if kind not in KINDS:
        return open_table(documents, kind, embedder, dimension)
    stored = partial(documents.vectors_by_ids, dimension=dimension)
    try:
        saved = VectorIndex.load(path, stored) if path.exists() else None
    except DamagedIndexError as error:
        log.warning("%s", error)
        saved = None
    if saved is not None and (saved.embedder, saved.dimension, saved.kind) == (embedder, dimension, kind):
        return saved
    return VectorIndex(dimension, kind=kind, embedder=embedder, stored=stored)


def open_table(documents: DocumentStore, kind: str, embedder: str, dimension: int) -> TableIndex:
    """An index that the database holds. Raises ConfigError, StoreNotFoundError."""
    check_choice("index kind", kind, (*KINDS, *INDEXES))
    stored = partial(documents.vectors_by_ids, dimension=dimension)
    return load("index kind", kind, INDEXES)(documents.database, dimension, embedder=embedder, stored=stored)
