"""Rows for training on frozen weights, drawn from a store: neighbouring passages, about which the model asks itself."""

from __future__ import annotations

import random
from pathlib import Path

from ragcache.engine.options import StoreConfig
from ragcache.engine.store import Store
from ragcache.errors import ConfigError
from ragcache_train.data import DataRow


def store_rows(path: str | Path, *, rows: int, passages: int, seed: int, database: str | None = None) -> list[DataRow]:
    """So many rows of so many passages that stand side by side in the store, in their order; each begins elsewhere.

    database: SQLAlchemy URL of a store whose documents are elsewhere

    There are fewer where the store has fewer. Raises ConfigError for an empty store, StoreNotFoundError.
    """
    with Store.open(path, store=StoreConfig(database=database, read_only=True)) as library:
        texts = [chunk.text for document in library.documents() for chunk in library.chunks_of(document.id)]
    if not texts:
        raise ConfigError(f"{path}: the store is empty; ingest something first")
    passages = min(passages, len(texts))
    places = range(len(texts) - passages + 1)
    starts = random.Random(f"store/{seed}").sample(places, min(rows, len(places)))
    return [
        DataRow("qa", f"{path}: passage {start + 1}", passages=tuple(texts[start : start + passages]), shuffle=False)
        for start in starts
    ]
