"""Index kinds that hold every vector: flat and HNSW."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import faiss as untyped_faiss
import numpy as np
from numpy.typing import NDArray

from ragcache.store.records import VectorBatch

# A set of vector ids in a byte for each id that was ever given out.


Ids = NDArray[np.int64]


class IdSet:
    """Ids count up from 0, so a row of flags holds them: a Python set takes 70 bytes for each, beside 100 of a vector
    that is compressed."""

    def __init__(self) -> None:
        self._held = np.zeros(0, dtype=bool)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, id: int) -> bool:
        return 0 <= id < len(self._held) and bool(self._held[id])

    def add(self, ids: Ids) -> None:
        """ids: 0 or more, each once."""
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
        """Returns those of the ids that were in it."""
        found = self.among(ids)
        self._held[found] = False
        self._size -= len(found)
        return found

    def among(self, ids: Ids) -> Ids:
        """Those of the ids that are in it, in their order."""
        known = ids[(ids >= 0) & (ids < len(self._held))]
        return known[self._held[known]]

    def array(self) -> Ids:
        """All of them, rising."""
        return np.flatnonzero(self._held)

    def bits(self) -> NDArray[np.uint8]:
        """A bit for each id, as FAISS reads them."""
        return np.packbits(self._held, bitorder="little")


# Its type stubs lack the search parameters and the selectors.
faiss: Any = untyped_faiss

Vectors = NDArray[np.float32]
# Vectors of the SQL store by their ids; an id that is no longer there is left out.
Stored = Callable[[Ids], VectorBatch]

HNSW_NEIGHBOURS = 32
HNSW_EF_CONSTRUCTION = 128
HNSW_EF_SEARCH = 128
# HNSW cannot delete: removed ids stay in the graph, unfindable, until they are this share of it.
MAX_REMOVED_SHARE = 0.25


class IndexKind(ABC):
    """Vectors in a FAISS structure, under ids of 0 or more. Not thread-safe: `VectorIndex` holds a lock around it.

    faiss: the structure; removed: ids in it that must not be found
    """

    def __init__(self, dimension: int, _stored: Stored | None) -> None:
        self.dimension = dimension
        self.faiss = self._empty()
        self.removed: set[int] = set()

    @property
    def ntotal(self) -> int:
        """Vectors in the structure, removed ones included."""
        return int(self.faiss.ntotal)

    @abstractmethod
    def _empty(self) -> Any:
        """A new structure."""

    def ids(self) -> Ids:
        """All that can be found."""
        held: Ids = faiss.vector_to_array(self.faiss.id_map).astype(np.int64)
        return held[~np.isin(held, list(self.removed))] if self.removed else held

    def make_ready(self, coming: Ids) -> None:
        """Prepare for these ids, which are in the SQL store and will be added."""
        return

    def add(self, keys: Ids, rows: Vectors) -> None:
        """rows: [len(keys), dimension]; none of the keys is in it."""
        if len(keys):
            self.faiss.add_with_ids(rows, keys)

    def remove(self, keys: Ids) -> None:
        self.faiss.remove_ids(faiss.IDSelectorBatch(keys))

    def compact(self) -> None:
        """Leave nothing of removed vectors behind."""
        return

    def search(self, query: Vectors, k: int, eligible: IdSet | None) -> tuple[Ids, Vectors]:
        """Up to k ids and their inner products with the query ([dimension]), in any order. eligible: None where all
        that is in the structure may be found."""
        scores, ids = self.faiss.search(query[None], k, params=self._parameters(selector(eligible), k))
        found = ids[0] >= 0
        return ids[0][found], scores[0][found]

    def scan(self, query: Vectors, k: int, eligible: IdSet) -> tuple[Ids, Vectors]:
        """`search` for a filter so narrow that it found too few: as many as there are."""
        keys = eligible.array()
        scores = self.vectors(keys).vectors @ query
        best = np.argsort(-scores, kind="stable")[:k]
        return keys[best], scores[best]

    def vectors(self, keys: Ids) -> VectorBatch:
        """The vectors of these keys, which are in the index."""
        if not len(keys):
            return VectorBatch(keys, np.empty((0, self.dimension), dtype=np.float32))
        return VectorBatch(keys, self.faiss.reconstruct_batch(keys))

    def agrees(self, keys: Ids, rows: Vectors) -> bool:
        """Whether the index was made of these vectors."""
        return np.array_equal(self.vectors(keys).vectors, rows)

    def _parameters(self, selector: Any, k: int) -> Any:
        return None if selector is None else faiss.SearchParameters(sel=selector)


class Flat(IndexKind):
    """Every vector as it is: exact."""

    def _empty(self) -> Any:
        return faiss.IndexIDMap2(faiss.IndexFlatIP(self.dimension))


class Hnsw(IndexKind):
    """A graph of neighbours over the vectors (Malkov and Yashunin, 2016): approximate."""

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
            live = self.vectors(np.sort(self.ids()))
            self.faiss, self.removed = self._empty(), set()
            super().add(live.ids, live.vectors)

    def _parameters(self, selector: Any, k: int) -> Any:
        return faiss.SearchParametersHNSW(sel=selector, efSearch=max(HNSW_EF_SEARCH, 2 * k))


def selector(eligible: IdSet | None) -> Any:
    """What FAISS takes to look at these ids alone."""
    return None if eligible is None else faiss.IDSelectorBitmap(eligible.bits())
