"""The index kind for many vectors: about 100 bytes each instead of 1,536."""

from __future__ import annotations

from typing import Any

import numpy as np

from ragcache.errors import ConfigError
from ragcache.retrieval.faiss_kinds import Flat, Ids, IdSet, Stored, Vectors, faiss, selector
from ragcache.store.records import VectorBatch

# Fewer vectors are kept as they are.
TRAIN_AT = 1 << 16
LEAST_LISTS, MOST_LISTS = 16, 1 << 14
POINTS_PER_LIST = 40  # of training; FAISS warns below 39
# Searched lists: so large a share of all, and no fewer than this.
PROBED_SHARE, LEAST_PROBED = 1 / 16, 16
NUMBERS_PER_BYTE = 4
OPQ_ROUNDS = 8
# Candidates by their codes, for each result wanted, that are ranked again by their stored vectors.
CANDIDATES_PER_RESULT, LEAST_CANDIDATES = 20, 200
BATCH = 4096
CHECKED = 16  # vectors of a batch that `agrees` searches for


class IvfPq(Flat):
    """Inverted lists of product-quantised codes (Jégou et al., 2011) after an optimised rotation (OPQ, Ge et al.,
    2013): a byte for every 4 numbers, and 8 for the id. Codes choose candidates; the SQL store's vectors rank them.

    Flat until it holds TRAIN_AT vectors, then trained on a sample of its vectors, and trained again each time four
    times as many vectors call for twice the lists.
    """

    def __init__(self, dimension: int, stored: Stored | None) -> None:
        super().__init__(dimension, stored)
        if stored is None:
            raise ConfigError("index kind 'ivfpq' keeps codes alone and needs a store to read vectors from")
        self._stored = stored

    @property
    def lists(self) -> int:
        """0 until it is trained."""
        return int(self._ivf.nlist) if self._is_trained else 0

    def ids(self) -> Ids:
        if not self._is_trained:
            return super().ids()
        lists = self._ivf.invlists
        sizes = [lists.list_size(number) for number in range(lists.nlist)]
        parts = [faiss.rev_swig_ptr(lists.get_ids(number), size) for number, size in enumerate(sizes) if size]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def make_ready(self, coming: Ids) -> None:
        total = self.ntotal + len(coming)
        if total < TRAIN_AT or wanted_lists(total) < 2 * self.lists:
            return
        held = np.sort(self.ids())
        trained = self._train(np.concatenate([held, coming]), wanted_lists(total))
        for start in range(0, len(held), BATCH):
            ids, rows = self._stored(held[start : start + BATCH])
            trained.add_with_ids(rows, ids)
        self.faiss = trained

    def add(self, keys: Ids, rows: Vectors) -> None:
        self.make_ready(keys)
        super().add(keys, rows)

    def search(self, query: Vectors, k: int, eligible: IdSet | None) -> tuple[Ids, Vectors]:
        if not self._is_trained:
            return super().search(query, k, eligible)
        return self._ranked(query, k, eligible, max(LEAST_PROBED, int(PROBED_SHARE * self.lists)))

    def scan(self, query: Vectors, k: int, eligible: IdSet) -> tuple[Ids, Vectors]:
        return self._ranked(query, k, eligible, self.lists) if self._is_trained else super().scan(query, k, eligible)

    def vectors(self, keys: Ids) -> VectorBatch:
        return self._stored(keys) if self._is_trained else super().vectors(keys)

    def agrees(self, keys: Ids, rows: Vectors) -> bool:
        """Return whether the codes of most of a few vectors lead to vectors as near as the vector itself."""
        if not self._is_trained:
            return super().agrees(keys, rows)
        checked = rows[:CHECKED]
        best = [self.search(row, 1, None)[1] for row in checked]
        near = [score[0] >= 0.99 * (row @ row) for row, score in zip(checked, best, strict=True) if len(score)]
        return bool(2 * sum(near) >= len(checked))

    @property
    def _is_trained(self) -> bool:
        return isinstance(self.faiss, faiss.IndexPreTransform)

    @property
    def _ivf(self) -> Any:
        return faiss.downcast_index(self.faiss.index)

    def _train(self, ids: Ids, lists: int) -> Any:
        """Return an empty structure trained on a sample of these vectors."""
        random = np.random.default_rng(len(ids))
        sample = random.choice(ids, min(len(ids), POINTS_PER_LIST * lists), replace=False)
        codes = max(1, self.dimension // NUMBERS_PER_BYTE)
        width = self.dimension // codes * codes
        rotation = faiss.OPQMatrix(self.dimension, codes, width)
        rotation.niter = OPQ_ROUNDS
        lists_of = faiss.IndexFlatIP(width)
        inverted = faiss.IndexIVFPQ(lists_of, width, lists, codes, 8, faiss.METRIC_INNER_PRODUCT)
        inverted.cp.min_points_per_centroid = inverted.pq.cp.min_points_per_centroid = 1
        made = faiss.IndexPreTransform(rotation, inverted)
        made.train(self._stored(np.sort(sample)).vectors)
        return made

    def _ranked(self, query: Vectors, k: int, eligible: IdSet | None, probed: int) -> tuple[Ids, Vectors]:
        wanted = min(self.ntotal, max(LEAST_CANDIDATES, CANDIDATES_PER_RESULT * k))
        inner = faiss.SearchParametersIVF(sel=selector(eligible), nprobe=probed)
        _, found = self.faiss.search(query[None], wanted, params=faiss.SearchParametersPreTransform(index_params=inner))
        ids, rows = self._stored(found[0][found[0] >= 0])
        scores = rows @ query
        best = np.lexsort((ids, -scores))[:k]
        return ids[best], scores[best]


def wanted_lists(vectors: int) -> int:
    """Return a power of two near 2 * sqrt(vectors).

    A search then compares about as many centres as codes of a few lists.
    """
    return int(np.clip(2 ** round(np.log2(2 * np.sqrt(vectors))), LEAST_LISTS, MOST_LISTS))
