"""Nearest neighbours by inner product, over FAISS.

The index holds nothing that SQL does not: ids are SQL's vector ids, and a lost or damaged index is rebuilt from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import faiss as untyped_faiss
import numpy as np
from numpy.typing import NDArray

from ragcache.errors import ConfigError, DamagedIndexError, check_choice, check_least
from ragcache.retrieval.index_file import IndexHeader, read_index, write_index

# Its type stubs lack SearchParametersHNSW and the selector.
faiss: Any = untyped_faiss

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]

HNSW_NEIGHBOURS = 32
HNSW_EF_CONSTRUCTION = 128
HNSW_EF_SEARCH = 128
# HNSW cannot delete: removed ids stay in the graph, unfindable, until they are this share of it.
MAX_REMOVED_SHARE = 0.25


class SearchResult(NamedTuple):
    """ids [n], scores [n]: best first, equal scores by ascending id."""

    ids: Ids
    scores: Vectors


def _flat(dimension: int) -> Any:
    return faiss.IndexFlatIP(dimension)


def _hnsw(dimension: int) -> Any:
    index = faiss.IndexHNSWFlat(dimension, HNSW_NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
    return index


KINDS: dict[str, Callable[[int], Any]] = {"flat": _flat, "hnsw": _hnsw}


class VectorIndex:
    """Vectors under int64 ids. Thread-safe: one lock guards the FAISS structure, which forbids search beside a change.

    kind "flat" is exact. kind "hnsw" is approximate; it still returns as many results as there are to return.
    embedder and generation travel with the file: they say which model made the vectors and which commit of the SQL
    store the index reflects (-1: none). saved_generation: of the file last written or read, None without one.
    """

    def __init__(self, dimension: int, *, kind: str = "flat", embedder: str = "") -> None:
        check_choice("index kind", kind, KINDS)
        check_least("dimension", dimension, 1)
        self.kind = kind
        self.dimension = dimension
        self.embedder = embedder
        self.generation = -1
        self.saved_generation: int | None = None
        self._lock = threading.RLock()
        self._index = faiss.IndexIDMap2(KINDS[kind](dimension))
        self._live: set[int] = set()
        self._removed: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, vector_id: int) -> bool:
        return vector_id in self._live

    @property
    def ids(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._live)

    def add(self, ids: Sequence[int] | Ids, vectors: Vectors) -> None:
        """vectors: [len(ids), dimension]. Raises ConfigError for an id already present, or vectors that are not
        finite or of another shape; then nothing was added."""
        keys = np.asarray(ids, dtype=np.int64).reshape(-1)
        rows = self._checked(vectors, len(keys))
        with self._lock:
            wanted = set(keys.tolist())
            present = wanted & self._live
            if present or len(wanted) != len(keys):
                raise ConfigError(f"vector ids are given twice or already in the index: {sorted(present)[:5]}")
            if wanted & self._removed:
                self._compact()
            if len(keys):
                self._index.add_with_ids(rows, keys)
            self._live |= wanted

    def remove(self, ids: Collection[int]) -> int:
        """Forget these ids; absent ones are fine. Returns how many were present."""
        with self._lock:
            gone = self._live & {int(vector_id) for vector_id in ids}
            self._live -= gone
            if not gone:
                return 0
            if self.kind == "flat":
                self._index.remove_ids(_selector(gone))
            else:
                self._removed |= gone
                if len(self._removed) > MAX_REMOVED_SHARE * self._index.ntotal:
                    self._compact()
            return len(gone)

    def compact(self) -> None:
        """Rebuild an HNSW graph without the ids that were removed; nothing to do for a flat index."""
        with self._lock:
            if self._removed:
                self._compact()

    def search(self, vector: Vectors, k: int, allowed: Collection[int] | None = None) -> SearchResult:
        """The k ids of largest inner product with `vector` ([dimension]), all of them when there are fewer.

        allowed: only these ids count. Raises ConfigError when k < 1 or the vector does not fit.
        """
        check_least("k", k, 1)
        query = self._checked(np.asarray(vector, dtype=np.float32).reshape(1, -1), 1)
        with self._lock:
            eligible = self._live if allowed is None else self._live & set(allowed)
            k = min(k, len(eligible))
            if k == 0:
                return SearchResult(np.empty(0, np.int64), np.empty(0, np.float32))
            selector = _selector(eligible) if len(eligible) < self._index.ntotal else None
            scores, ids = self._index.search(query, k, params=self._parameters(selector, k))
            found = ids[0] >= 0
            if int(found.sum()) < k:  # the graph search ended early: a narrow filter, or islands left by removals
                return self._scan(query[0], k, eligible)
            return _ranked(ids[0][found], scores[0][found])

    def vectors(self, ids: Sequence[int] | Ids) -> Vectors:
        """The vectors of these ids, [len(ids), dimension]. Raises ConfigError for an absent id."""
        keys = np.asarray(ids, dtype=np.int64).reshape(-1)
        with self._lock:
            absent = set(keys.tolist()) - self._live
            if absent:
                raise ConfigError(f"vector ids are not in the index: {sorted(absent)[:5]}")
            return self._reconstruct(keys)

    def vectors_present(self, ids: Ids) -> tuple[Ids, Vectors]:
        """Rows of `ids` that are in the index, and their vectors: for ids that may have been removed meanwhile."""
        with self._lock:
            rows = np.array([row for row, vector_id in enumerate(ids.tolist()) if vector_id in self._live], np.int64)
            return rows, self._reconstruct(ids[rows])

    def save(self, path: Path) -> None:
        """Write the index to `path`, atomically. Raises StoreFullError, StoreReadOnlyError."""
        with self._lock:
            header = IndexHeader(
                self.kind, self.dimension, self.embedder, self.generation, tuple(sorted(self._removed))
            )
            payload: bytes = faiss.serialize_index(self._index).tobytes()
        write_index(path, header, payload)
        self.saved_generation = header.generation

    @classmethod
    def load(cls, path: Path) -> VectorIndex:
        """The index saved at `path`. Raises DamagedIndexError when it is absent or any byte differs."""
        header, payload = read_index(path)
        try:
            index = cls(header.dimension, kind=header.kind, embedder=header.embedder)
            index._index = faiss.deserialize_index(np.frombuffer(payload, dtype=np.uint8))
        except (ConfigError, RuntimeError) as error:
            raise DamagedIndexError(f"{path}: {error}; it is rebuilt from the store") from error
        index.generation = index.saved_generation = header.generation
        index._removed = set(header.removed)
        index._live = set(faiss.vector_to_array(index._index.id_map).tolist()) - index._removed
        return index

    def _checked(self, vectors: Vectors, rows: int) -> Vectors:
        checked = np.ascontiguousarray(vectors, dtype=np.float32)
        if checked.shape != (rows, self.dimension):
            raise ConfigError(f"vectors have shape {checked.shape}; the index needs {(rows, self.dimension)}")
        if not np.isfinite(checked).all():
            raise ConfigError("a vector has NaN or infinite entries; the embedding model is broken")
        return checked

    def _parameters(self, selector: Any, k: int) -> Any:
        if self.kind == "hnsw":
            return faiss.SearchParametersHNSW(sel=selector, efSearch=max(HNSW_EF_SEARCH, 2 * k))
        return None if selector is None else faiss.SearchParameters(sel=selector)

    def _scan(self, query: Vectors, k: int, eligible: set[int]) -> SearchResult:
        keys = np.fromiter(sorted(eligible), dtype=np.int64, count=len(eligible))
        scores = self._reconstruct(keys) @ query
        best = np.argsort(-scores, kind="stable")[:k]
        return SearchResult(keys[best], scores[best])

    def _reconstruct(self, keys: Ids) -> Vectors:
        if len(keys) == 0:
            return np.empty((0, self.dimension), dtype=np.float32)
        rows: Vectors = self._index.reconstruct_batch(keys)
        return rows

    def _compact(self) -> None:
        """Rebuild the structure without removed ids."""
        keys = np.fromiter(sorted(self._live), dtype=np.int64, count=len(self._live))
        rows = self._reconstruct(keys)
        self._index = faiss.IndexIDMap2(KINDS[self.kind](self.dimension))
        if len(keys):
            self._index.add_with_ids(rows, keys)
        self._removed = set()


def _selector(ids: Collection[int]) -> Any:
    return faiss.IDSelectorBatch(np.fromiter(ids, dtype=np.int64, count=len(ids)))


def _ranked(ids: Ids, scores: Vectors) -> SearchResult:
    order = np.lexsort((ids, -scores))
    return SearchResult(ids[order], scores[order])
