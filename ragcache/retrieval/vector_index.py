"""Nearest neighbours by inner product, over FAISS.

The index holds only data that SQL has too: ids are SQL's vector ids, and a lost or damaged index is rebuilt from SQL.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ragcache.errors import ConfigError, DamagedIndexError, check_choice, check_least
from ragcache.retrieval.faiss_kinds import Flat, Hnsw, Ids, IdSet, IndexKind, Vectors, faiss
from ragcache.retrieval.index_file import IndexHeader, read_index, write_index
from ragcache.seal import UNSEALED, Seal
from ragcache.store.documents import DocumentStore
from ragcache.store.filters import Filter
from ragcache.store.records import VectorBatch

KINDS: dict[str, type[IndexKind]] = {"flat": Flat, "hnsw": Hnsw}


class SearchResult(NamedTuple):
    """Vectors found by a search: ids int64 [n] and scores float32 [n], best first, equal scores by ascending id."""

    ids: Ids
    scores: Vectors


class SearchIndex(Protocol):
    """An index that a retriever searches: a `VectorIndex`, which documents the methods, or a table of the documents'
    database.

    generation: generation of the SQL store that the index reflects
    saved_generation: generation of the index as last saved
    """

    @property
    def kind(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    @property
    def embedder(self) -> str: ...

    generation: int

    @property
    def saved_generation(self) -> int | None: ...
    @property
    def ids(self) -> frozenset[int]: ...
    def __len__(self) -> int: ...
    def follow(self, documents: DocumentStore, /) -> None: ...
    def take(
        self, documents: DocumentStore, added: Sequence[int], vectors: Vectors, removed: Collection[int], /
    ) -> None: ...
    def find(self, documents: DocumentStore, vector: Vectors, k: int, where: Filter | None, /) -> SearchResult: ...
    def vectors_present(self, ids: Ids) -> tuple[Ids, Vectors]: ...
    def agrees(self, batch: VectorBatch, /) -> bool: ...
    def compact(self) -> None: ...
    def save(self, path: Path, /) -> None: ...


class TableIndex(SearchIndex, Protocol):
    """An index in a table of the documents' database. `clear` empties the table."""

    def clear(self) -> None: ...


class VectorIndex:
    """A FAISS index of vectors under ids of 0 or more.

    Thread-safe: a lock guards the FAISS structure, which must not be searched while it changes.

    kind:       "flat" is exact; "hnsw" is approximate, but still returns k results if the index has them, with exact
                scores
    embedder:   name of the model that made the vectors; saved in the file
    generation: generation of the SQL store that the index reflects, -1 for none; saved in the file
    saved_generation: generation of the file last written or read; None without a file
    seal:       the seal of the store, for the file
    """

    def __init__(
        self,
        dimension: int,
        *,
        kind: str = "flat",
        embedder: str = "",
        seal: Seal = UNSEALED,
    ) -> None:
        check_choice("index kind", kind, KINDS)
        check_least("dimension", dimension, 1)
        self.kind = kind
        self.dimension = dimension
        self.embedder = embedder
        self.seal = seal
        self.generation = -1
        self.saved_generation: int | None = None
        self._lock = threading.RLock()
        self._index = KINDS[kind](dimension)
        self._live = IdSet()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, vector_id: int) -> bool:
        return vector_id in self._live

    @property
    def ids(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._live.array().tolist())

    def follow(self, documents: DocumentStore) -> None:
        """Add and remove vectors until the index has those that SQL searches.

        Comparing ids is enough, because the vector of an id never changes.
        """
        current = documents.vector_ids()
        known = self.ids
        self.remove(known - current)
        missing = current - known
        if not missing:
            return
        for batch in documents.all_vectors(after=min(missing) - 1):
            rows = [row for row, id in enumerate(batch.ids.tolist()) if id in missing]
            self.add(batch.ids[rows], batch.vectors[rows])

    def take(self, _documents: DocumentStore, added: Sequence[int], vectors: Vectors, removed: Collection[int]) -> None:
        """Add and remove the vectors that a commit added and removed. Ids already present are not added again."""
        self.remove(removed)
        fresh = [row for row, id in enumerate(added) if id not in self]
        self.add([added[row] for row in fresh], vectors[fresh])

    def add(self, ids: Sequence[int] | Ids, vectors: Vectors) -> None:
        """Add vectors under the given ids. vectors: [len(ids), dimension]

        Raises ConfigError for an id that is already present or below 0, and for vectors that are not finite or have
        another shape; then nothing was added.
        """
        keys = np.asarray(ids, dtype=np.int64).reshape(-1)
        rows = self._checked(vectors, len(keys))
        if len(keys) and keys.min() < 0:
            raise ConfigError(f"vector id {keys.min()} is below 0")
        with self._lock:
            present = self._live.among(keys)
            if len(present) or len(np.unique(keys)) != len(keys):
                raise ConfigError(f"vector ids are given twice or already in the index: {sorted(present.tolist())[:5]}")
            self._index.add(keys, rows)
            self._live.add(keys)

    def remove(self, ids: Collection[int]) -> int:
        """Remove these ids, ignoring absent ids, and return how many were present."""
        with self._lock:
            gone = self._live.discard(np.fromiter(set(ids), dtype=np.int64))
            if len(gone):
                self._index.remove(gone)
            return len(gone)

    def compact(self) -> None:
        """Erase removed vectors completely: HNSW keeps them in its graph for a while."""
        with self._lock:
            self._index.compact()

    def find(self, documents: DocumentStore, vector: Vectors, k: int, where: Filter | None) -> SearchResult:
        """Search among the chunks that pass a filter; see `search`. Raises FilterError."""
        is_all = documents.shows_all(where, self.generation)
        return self.search(vector, k, None if is_all else documents.vector_ids(where))

    def search(self, vector: Vectors, k: int, allowed: Collection[int] | None = None) -> SearchResult:
        """Return the k ids with the largest inner product with `vector` ([dimension]), or all ids if there are fewer.

        allowed: search only these ids; None: all
        Raises ConfigError if k < 1 or the vector has another shape or is not finite.
        """
        check_least("k", k, 1)
        query = self._checked(np.asarray(vector, dtype=np.float32).reshape(1, -1), 1)[0]
        with self._lock:
            eligible = self._live
            if allowed is not None:
                eligible = IdSet()
                eligible.add(self._live.among(np.fromiter(set(allowed), dtype=np.int64)))
            k = min(k, len(eligible))
            if k == 0:
                return SearchResult(np.empty(0, np.int64), np.empty(0, np.float32))
            every = len(eligible) == self._index.ntotal
            ids, scores = self._index.search(query, k, None if every else eligible)
            if len(ids) < k:  # the search ended early: a narrow filter, or a graph that removals have split
                ids, scores = self._index.scan(query, k, eligible)
            return ranked(ids, scores)

    def vectors_present(self, ids: Ids) -> tuple[Ids, Vectors]:
        """Return the positions in `ids` of the ids that are still in the index, and their vectors."""
        with self._lock:
            rows = np.flatnonzero(np.isin(ids, self._live.among(ids)))
            return rows, self._index.vectors(ids[rows])

    def agrees(self, batch: VectorBatch) -> bool:
        """Return whether the index was built from these vectors. Ids that it does not have are ignored."""
        with self._lock:
            known = np.isin(batch.ids, self._live.among(batch.ids))
            return np.array_equal(self._index.vectors(batch.ids[known]), batch.vectors[known])

    def save(self, path: Path) -> None:
        """Write the index to `path`, atomically. Raises StoreFullError, StoreReadOnlyError."""
        with self._lock:
            removed = sorted(self._index.removed)
            header = IndexHeader(self.kind, self.dimension, self.embedder, self.generation, removed)
            payload = memoryview(faiss.serialize_index(self._index.faiss))
        write_index(path, header, payload, self.seal)
        self.saved_generation = header.generation

    @classmethod
    def load(cls, path: Path, seal: Seal = UNSEALED) -> VectorIndex:
        """Load the index saved at `path`. Raises DamagedIndexError if the file is absent or any byte differs."""
        header, payload = read_index(path, seal)
        try:
            index = cls(header.dimension, kind=header.kind, embedder=header.embedder, seal=seal)
            saved = faiss.deserialize_index(np.frombuffer(payload, dtype=np.uint8))
        except (ConfigError, RuntimeError) as error:
            raise DamagedIndexError(f"{path}: {error}; it is rebuilt from the store") from error
        index.generation = index.saved_generation = header.generation
        index._index.faiss, index._index.removed = saved, set(header.removed)
        index._live.add(index._index.ids())
        return index

    def _checked(self, vectors: Vectors, rows: int) -> Vectors:
        checked = np.ascontiguousarray(vectors, dtype=np.float32)
        if checked.shape != (rows, self.dimension):
            raise ConfigError(f"vectors have shape {checked.shape}; the index needs {(rows, self.dimension)}")
        if not np.isfinite(checked).all():
            raise ConfigError("a vector has NaN or infinite entries; the embedding model is broken")
        return checked


def ranked(ids: Ids, scores: Vectors) -> SearchResult:
    """Return the result sorted best first, equal scores by ascending id."""
    order = np.lexsort((ids, -scores))
    return SearchResult(ids[order], scores[order])
