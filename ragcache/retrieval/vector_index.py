"""Nearest neighbours by inner product, over FAISS.

The index holds nothing that SQL does not: ids are SQL's vector ids, and a lost or damaged index is rebuilt from there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ragcache.errors import ConfigError, DamagedIndexError, check_least
from ragcache.plugins import load
from ragcache.retrieval.faiss_kinds import Flat, Hnsw, Ids, IdSet, IndexKind, Stored, Vectors, faiss
from ragcache.retrieval.index_file import IndexHeader, read_index, write_index
from ragcache.store.documents import DocumentStore
from ragcache.store.filters import Filter
from ragcache.store.records import VectorBatch

KINDS: dict[str, type[IndexKind] | str] = {"flat": Flat, "hnsw": Hnsw, "ivfpq": "ragcache_papers.ivfpq:IvfPq"}


class SearchResult(NamedTuple):
    """ids [n], scores [n]: best first, equal scores by ascending id."""

    ids: Ids
    scores: Vectors


class SearchIndex(Protocol):
    """What a retriever searches: `VectorIndex`, or a table of the documents' own database.

    generation: the commit of the SQL store that it reflects; saved_generation: the same of what `save` wrote last
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
    """One that the documents' database holds."""

    def clear(self) -> None: ...


class VectorIndex:
    """Vectors under ids of 0 or more. Thread-safe: one lock guards the FAISS structure, which forbids search beside a
    change.

    kind "flat" is exact. Kinds "hnsw" and "ivfpq" are approximate; they still return as many results as there are to
    return, with their exact scores. stored: reads vectors of the SQL store; "ivfpq" needs it, and adds only what is
    there. embedder and generation travel with the file: they say which model made the vectors and which commit of the
    SQL store the index reflects (-1: none). saved_generation: of the file last written or read, None without one.
    """

    def __init__(self, dimension: int, *, kind: str = "flat", embedder: str = "", stored: Stored | None = None) -> None:
        make = load("index kind", kind, KINDS)
        check_least("dimension", dimension, 1)
        self.kind = kind
        self.dimension = dimension
        self.embedder = embedder
        self.generation = -1
        self.saved_generation: int | None = None
        self._lock = threading.RLock()
        self._index = make(dimension, stored)
        self._live = IdSet()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, vector_id: int) -> bool:
        return vector_id in self._live

    @property
    def ids(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._live.array().tolist())

    def make_ready(self, coming: Collection[int]) -> None:
        """Prepare for many ids that will be added, batch by batch, and are in the SQL store already."""
        with self._lock:
            self._index.make_ready(np.fromiter(coming, dtype=np.int64, count=len(coming)))

    def follow(self, documents: DocumentStore) -> None:
        """Hold the ids of SQL's searched vectors. A vector never changes under its id, so ids tell all."""
        current = documents.vector_ids()
        known = self.ids
        self.remove(known - current)
        missing = current - known
        if not missing:
            return
        self.make_ready(missing)
        for batch in documents.all_vectors(after=min(missing) - 1):
            rows = [row for row, id in enumerate(batch.ids.tolist()) if id in missing]
            self.add(batch.ids[rows], batch.vectors[rows])

    def take(self, _documents: DocumentStore, added: Sequence[int], vectors: Vectors, removed: Collection[int]) -> None:
        """Add and remove what a commit did; ids that are there already are left as they are."""
        self.remove(removed)
        fresh = [row for row, id in enumerate(added) if id not in self]
        self.add([added[row] for row in fresh], vectors[fresh])

    def add(self, ids: Sequence[int] | Ids, vectors: Vectors) -> None:
        """vectors: [len(ids), dimension]. Raises ConfigError for an id already present or below 0, or vectors that are
        not finite or of another shape; then nothing was added."""
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
        """Forget these ids; absent ones are fine. Returns how many were present."""
        with self._lock:
            gone = self._live.discard(np.fromiter(set(ids), dtype=np.int64))
            if len(gone):
                self._index.remove(gone)
            return len(gone)

    def compact(self) -> None:
        """Leave nothing of removed vectors behind: HNSW keeps them in its graph for a while."""
        with self._lock:
            self._index.compact()

    def find(self, documents: DocumentStore, vector: Vectors, k: int, where: Filter | None) -> SearchResult:
        """`search` among the chunks that pass a filter. Raises FilterError."""
        return self.search(vector, k, documents.vector_ids(where) if where else None)

    def search(self, vector: Vectors, k: int, allowed: Collection[int] | None = None) -> SearchResult:
        """The k ids of largest inner product with `vector` ([dimension]), all of them when there are fewer.

        allowed: only these ids count. Raises ConfigError when k < 1 or the vector does not fit.
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
            if len(ids) < k:  # the search ended early: a narrow filter, or islands in a graph left by removals
                ids, scores = self._index.scan(query, k, eligible)
            return ranked(ids, scores)

    def vectors_present(self, ids: Ids) -> tuple[Ids, Vectors]:
        """Rows of `ids` that are in the index, and their vectors: for ids that may have been removed meanwhile."""
        with self._lock:
            return rows_among(ids, self._index.vectors(self._live.among(ids)))

    def agrees(self, batch: VectorBatch) -> bool:
        """Whether the index was made of these vectors, as far as it has them."""
        with self._lock:
            known = np.isin(batch.ids, self._live.among(batch.ids))
            return self._index.agrees(batch.ids[known], batch.vectors[known])

    def save(self, path: Path) -> None:
        """Write the index to `path`, atomically. Raises StoreFullError, StoreReadOnlyError."""
        with self._lock:
            removed = sorted(self._index.removed)
            header = IndexHeader(self.kind, self.dimension, self.embedder, self.generation, removed)
            payload = memoryview(faiss.serialize_index(self._index.faiss))
        write_index(path, header, payload)
        self.saved_generation = header.generation

    @classmethod
    def load(cls, path: Path, stored: Stored | None = None) -> VectorIndex:
        """The index saved at `path`. Raises DamagedIndexError when it is absent or any byte differs."""
        header, payload = read_index(path)
        try:
            index = cls(header.dimension, kind=header.kind, embedder=header.embedder, stored=stored)
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


def rows_among(ids: Ids, found: VectorBatch) -> tuple[Ids, Vectors]:
    """Rows of `ids` that were found, and their vectors."""
    at = {id: row for row, id in enumerate(found.ids.tolist())}
    rows = np.array([row for row, id in enumerate(ids.tolist()) if id in at], np.int64)
    return rows, found.vectors[[at[id] for id in ids[rows].tolist()]]


def ranked(ids: Ids, scores: Vectors) -> SearchResult:
    """Best first, equal scores by ascending id."""
    order = np.lexsort((ids, -scores))
    return SearchResult(ids[order], scores[order])
