"""Open the index of a store, of whatever kind."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from ragcache.errors import DamagedIndexError, check_choice
from ragcache.retrieval.index import KINDS, SearchIndex, VectorIndex
from ragcache.retrieval.kinds import Stored
from ragcache.retrieval.pgvector import PgVectorIndex
from ragcache.store.documents import DocumentStore

log = logging.getLogger(__name__)


def open_index(documents: DocumentStore, path: Path, kind: str, embedder: str, dimension: int) -> SearchIndex:
    """The index saved at `path`, or an empty one where the file is absent, damaged, of another kind or embedder; kind
    "pgvector" is a table of the database. Not yet brought up to date. Raises ConfigError, StoreNotFoundError."""
    check_choice("index kind", kind, (*KINDS, PgVectorIndex.kind))
    stored = partial(documents.vectors_by_ids, dimension=dimension)
    if kind == PgVectorIndex.kind:
        return PgVectorIndex(documents.database, dimension, embedder=embedder, stored=stored)
    saved = _saved_index(path, stored)
    if saved is not None and (saved.embedder, saved.dimension, saved.kind) == (embedder, dimension, kind):
        return saved
    return VectorIndex(dimension, kind=kind, embedder=embedder, stored=stored)


def _saved_index(path: Path, stored: Stored) -> VectorIndex | None:
    if not path.exists():
        return None
    try:
        return VectorIndex.load(path, stored)
    except DamagedIndexError as error:
        log.warning("%s", error)
        return None
