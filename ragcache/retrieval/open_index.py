"""Open the index of a store: a file read by FAISS, or a table of the documents' database."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ragcache.errors import DamagedIndexError, check_choice
from ragcache.plugins import load
from ragcache.retrieval.vector_index import KINDS, SearchIndex, TableIndex, VectorIndex
from ragcache.seal import UNSEALED, Seal
from ragcache.store.documents import DocumentStore

log = logging.getLogger(__name__)
INDEXES: dict[str, Callable[..., TableIndex] | str] = {"pgvector": "ragcache_postgres.pgvector:PgVectorIndex"}
"""Kinds of index in the documents' database: by name, a class or its place. A class is called with the `DocumentStore`,
the dimension and `embedder=`, the embedder's name."""


def open_index(
    documents: DocumentStore, path: Path, kind: str, embedder: str, dimension: int, seal: Seal = UNSEALED
) -> SearchIndex:
    """Return the index saved at `path`, not yet brought up to date.

    The index is empty if the file is absent, damaged, or of another kind or embedder. Kind "pgvector" is a table of the
    documents' database instead. Raises the errors of `open_table`.
    """
    if kind not in KINDS:
        return open_table(documents, kind, embedder, dimension)
    try:
        saved = VectorIndex.load(path, seal) if path.exists() else None
    except DamagedIndexError as error:
        log.warning("%s", error)
        saved = None
    if saved is not None and (saved.embedder, saved.dimension, saved.kind) == (embedder, dimension, kind):
        return saved
    return VectorIndex(dimension, kind=kind, embedder=embedder, seal=seal)


def open_table(documents: DocumentStore, kind: str, embedder: str, dimension: int) -> TableIndex:
    """Open an index in the documents' database.

    Raises ConfigError for an unknown kind or a database that cannot hold the index, and StoreNotFoundError.
    """
    check_choice("index kind", kind, (*KINDS, *INDEXES))
    return load("index kind", kind, INDEXES)(documents, dimension, embedder=embedder)
