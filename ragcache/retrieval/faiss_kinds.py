"""Index kinds that hold every vector: flat and HNSW."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import faiss as untyped_faiss
import numpy as np
from numpy.typing import NDArray

# Vector ids, [n].
Ids = NDArray[np.int64]


class IdSet:
    """A set of vector ids: an array with a byte for each id up to the largest.

    Vector ids count up from 0, so the array has few gaps. A Python set takes 70 bytes an id.
    """

    def __init__(self) -> None:
        self._held = np.zeros(0, dtype=bool)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, id: int) -> bool:
        return 0 <= id < len(self._held) and bool(self._held[id])

    def add(self, ids: Ids) -> None:
        """Add ids. They are 0 or more, and `ids` holds each only once."""
        if not len(ids):
            return
        least = int(ids.max()) + 1
        if least > len(self._held):
            grown = np.zeros(max(least, 2 * len(self._held)), dtype=bool)
            grown[: len(self._held)] = self._held
            self._held = grown
        self._size += len(ids) - int(self._held[ids].sum())
        self._held[ids] = True

    def discard(self, ids: Ids) -> Ids:
        """Remove ids, and return those that were in the set."""
        found = self.among(ids)
        self._held[found] = False
        self._size -= len(found)
        return found

    def among(self, ids: Ids) -> Ids:
        """Return those of `ids` that are in the set, in the order given."""
        known = ids[(ids >= 0) & (ids < len(self._held))]
        return known[self._held[known]]

    def array(self) -> Ids:
        """Return all ids in ascending order."""
        return np.flatnonzero(self._held)

    def bits(self) -> NDArray[np.uint8]:
        """Return the set as a bitmap in FAISS's format."""
        return np.packbits(self._held, bitorder="little")


# FAISS's type stubs lack the search parameters and the selectors.
faiss: Any = untyped_faiss

Vectors = NDArray[np.float32]

HNSW_NEIGHBOURS = 32
HNSW_EF_CONSTRUCTION = 128
HNSW_EF_SEARCH = 128
# HNSW cannot delete: removed ids stay in the graph, hidden from searches, until they make up this share of the graph.
MAX_REMOVED_SHARE = 0.25


class IndexKind(ABC):
    """Vectors in a FAISS structure, under ids of 0 or more. Not thread-safe: `VectorIndex` guards it with a lock.

    faiss: the FAISS structure
    removed: ids in the structure that must not be found
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.faiss = self._empty()
        self.removed: set[int] = set()

    @property
    def ntotal(self) -> int:
        """Return the number of vectors in the structure, including removed vectors."""
        return int(self.faiss.ntotal)

    @abstractmethod
    def _empty(self) -> Any:
        """Return a new, empty structure."""

    def ids(self) -> Ids:
        """Return all ids that can be found."""
        held: Ids = faiss.vector_to_array(self.faiss.id_map).astype(np.int64)
        return held[~np.isin(held, list(self.removed))] if self.removed else held

    def add(self, keys: Ids, rows: Vectors) -> None:
        """Add vectors under new ids. keys: the ids, all absent from the index. rows: [len(keys), dimension]"""
        if len(keys):
            self.faiss.add_with_ids(rows, keys)

    def remove(self, keys: Ids) -> None:
        self.faiss.remove_ids(faiss.IDSelectorBatch(keys))

    def compact(self) -> None:
        """Erase removed vectors completely."""
        return

    def search(self, query: Vectors, k: int, eligible: IdSet | None) -> tuple[Ids, Vectors]:
        """Return up to k ids and their inner products with the query ([dimension]), in any order.

        eligible: the ids that may be found; None: all in the structure
        """
        scores, ids = self.faiss.search(query[None], k, params=self._parameters(selector(eligible), k))
        found = ids[0] >= 0
        return ids[0][found], scores[0][found]

    def scan(self, query: Vectors, k: int, eligible: IdSet) -> tuple[Ids, Vectors]:
        """Search all eligible ids exhaustively: for filters so narrow that `search` finds fewer than k ids.

        Return min(k, len(eligible)) ids and their inner products with the query ([dimension]), best first.
        """
        keys = eligible.array()
        scores = self.vectors(keys) @ query
        best = np.argsort(-scores, kind="stable")[:k]
        return keys[best], scores[best]

    def vectors(self, keys: Ids) -> Vectors:
        """Return the vectors of these ids, which are in the index."""
        if not len(keys):
            return np.empty((0, self.dimension), dtype=np.float32)
        found: Vectors = self.faiss.reconstruct_batch(keys)
        return found

    def _parameters(self, selector: Any, k: int) -> Any:
        return None if selector is None else faiss.SearchParameters(sel=selector)


class Flat(IndexKind):
    """An exact index of uncompressed vectors."""

    def _empty(self) -> Any:
        return faiss.IndexIDMap2(faiss.IndexFlatIP(self.dimension))


class Hnsw(IndexKind):
    """An approximate index: a graph of neighbours over the vectors (Malkov and Yashunin, 2016)."""

    def _empty(self) -> Any:
        graph = faiss.IndexHNSWFlat(self.dimension, HNSW_NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
        return faiss.IndexIDMap2(graph)

    def add(self, keys: Ids, rows: Vectors) -> None:
        if not self.removed.isdisjoint(keys.tolist()):
            self.compact()
        super().add(keys, rows)

    def remove(self, keys: Ids) -> None:
        self.removed.update(keys.tolist())
        if len(self.removed) > MAX_REMOVED_SHARE * self.ntotal:
            self.compact()

    def compact(self) -> None:
        """Rebuild the graph without the ids that were removed."""
        if self.removed:
            keys = np.sort(self.ids())
            rows = self.vectors(keys)
            self.faiss, self.removed = self._empty(), set()
            super().add(keys, rows)

    def _parameters(self, selector: Any, k: int) -> Any:
        return faiss.SearchParametersHNSW(sel=selector, efSearch=max(HNSW_EF_SEARCH, 2 * k))


def selector(eligible: IdSet | None) -> Any:
    """Return the FAISS selector that limits a search to these ids, or None for all ids."""
    return None if eligible is None else faiss.IDSelectorBitmap(eligible.bits())
