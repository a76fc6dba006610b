"""The neighbours of each chunk, which the model reads before it: the chunks with the most similar embeddings, or the
chunks before it in its document.

FusionRAG (arXiv 2601.12904) finds similar chunks once, for a corpus that does not change. Here documents come and go:

    document added    -> neighbours are found for its chunks, and found again for older chunks to which a new chunk is
                         nearer than a recorded neighbour. KV that was encoded with other neighbours is discarded
    document deleted  -> KV that was encoded with its chunks as neighbours is discarded too; neighbours are found again
                         at the next ingestion or the chunk's next question, whichever comes first

The preceding chunks of a document are added and deleted together with it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Self, TypeVar

import numpy as np

from ragcache.errors import StoreBusyError, StoreFullError, StoreReadOnlyError
from ragcache.models.deadline import LIMIT
from ragcache.retrieval.retriever import Retriever
from ragcache.store.documents import DocumentStore
from ragcache.store.filters import Filter
from ragcache.store.neighbours import DOCUMENT, SIMILARITY, Near, NeighbourChoice, NeighbourTable
from ragcache.store.records import Chunk, VectorBatch

T = TypeVar("T")

log = logging.getLogger(__name__)

# A search for n neighbours first fetches FETCH_FACTOR * (n + 1) chunks: the chunk itself is found too, and copies are
# left out. While copies crowd out neighbours, it fetches FETCH_FACTOR times as many, until MOST_FETCHED is reached.
FETCH_FACTOR, MOST_FETCHED = 4, 256
# Texts are copies if they have more than this share of their runs of tokens in common.
RUN, MOST_SHARED = 8, 1 / 3
# Embeddings compared at once: two such batches and their products take 80 MB.
BATCH = 4096
# Chunks whose neighbours, and whose KV, are committed together.
WINDOW = 64
# Inner products that are summed in another order differ by this much. A chunk that is searched for again without need
# keeps its neighbours.
ROUNDING = 1e-5


class Neighbourhood(ABC):
    """Finds and records the neighbours of a store's chunks. Thread-safe.

    choice: the most neighbours of a chunk, how they are chosen, and the order in which they are read
    """

    def __init__(self, documents: DocumentStore, retriever: Retriever, choice: NeighbourChoice) -> None:
        self.choice = choice
        self._documents = documents
        self._retriever = retriever
        self._table = NeighbourTable(documents.database)
        self._where: Filter | None = None
        self._there: dict[str, DocumentStore] = {}  # views of a single collection, by its name

    def passing(self, where: Filter) -> Self:
        """Return a copy that finds only neighbours that pass a question's filter."""
        near = copy(self)
        near._where = where
        return near

    def of(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Return the neighbours of each chunk, nearest first; none for a passage from outside the store.

        If a stored chunk has no recorded neighbours, they are found and recorded.
        """
        ids = [chunk.vector_id for chunk in chunks if chunk.is_stored]
        recorded = self._table.of(ids)
        recorded |= self._found_now([id for id in dict.fromkeys(ids) if id not in recorded])
        if self._where:
            passing = self._documents.passing_among({id for found in recorded.values() for id in found}, self._where)
            for id, found in recorded.items():
                if not set(found) <= set(passing):  # a hidden passage must not take a visible one's place either
                    recorded[id] = [near.vector_id for near in self._find(id, self._where)]
        there = self._documents.chunks_by_vector_ids({id for found in recorded.values() for id in found})
        by_id = {chunk.vector_id: chunk for chunk in there}
        return [[by_id[id] for id in recorded.get(chunk.vector_id, ()) if id in by_id] for chunk in chunks]

    def update(self) -> None:
        """Find and record the neighbours of chunks that have none recorded, or to which a new chunk may be nearer.

        The caller holds the writer lock. Raises the errors of `NeighbourTable.record`, and CancelledError and
        TimedOutError under `deadline.limited`.
        """
        new = self._newer_than(self._table.compared())
        outdated = self._outdated(new)
        for start in range(0, len(outdated), WINDOW):
            LIMIT.get().check()
            self._table.record({id: self._find(id) for id in outdated[start : start + WINDOW]})
        if len(new.ids):
            self._table.set_compared(int(new.ids[-1]))

    def without_kv(self) -> Iterator[list[Chunk]]:
        """Yield the chunks whose KV is still to be computed, in batches."""
        ids = self._table.without_kv()
        for start in range(0, len(ids), WINDOW):
            yield self._documents.chunks_by_vector_ids(ids[start : start + WINDOW])

    @abstractmethod
    def _outdated(self, new: VectorBatch) -> list[int]:
        """Return the vector ids of chunks whose neighbours may differ from those recorded.

        new: searched vectors that were not compared before
        """

    @abstractmethod
    def _find(self, vector_id: int, where: Filter | None = None) -> list[Near]:
        """Return the neighbours of a chunk among those that pass a filter, nearest first."""

    def _newer_than(self, vector_id: int) -> VectorBatch:
        batches = list(self._documents.all_vectors(after=vector_id))
        if not batches:
            return VectorBatch(np.empty(0, np.int64), np.empty((0, self._retriever.index.dimension), np.float32))
        return VectorBatch(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))

    def _found_now(self, vector_ids: Sequence[int]) -> dict[int, list[int]]:
        """Find the neighbours that a question needs. If they cannot be recorded, the next question finds them again."""
        found = {id: near for id in vector_ids if (near := self._find(id))}
        try:
            if found:
                self._table.record(found)
        except (StoreReadOnlyError, StoreBusyError, StoreFullError) as error:
            log.warning("the neighbours of %d chunks are not recorded: %s", len(found), error)
        return {id: [near.vector_id for near in some] for id, some in found.items()}


class Preceding(Neighbourhood):
    """A neighbourhood of the chunks right before a chunk in its document, to which its text may refer. The model reads
    them in the document's order."""

    def _outdated(self, new: VectorBatch) -> list[int]:
        # The chunks before a stored chunk never change, so only new chunks count.
        return [int(id) for id in np.unique(self._documents.chunks_of_vectors(new.ids))]

    def _find(self, vector_id: int, where: Filter | None = None) -> list[Near]:
        """Return the preceding chunks, nearest first. A document's chunks have consecutive vector ids."""
        own = next(iter(self._documents.chunks_by_vector_ids([vector_id])), None)
        before = 0 if own is None else min(self.choice.number, own.ordinal)
        ids = range(vector_id - 1, vector_id - before - 1, -1)
        passing = set(self._documents.passing_among(ids, where))
        return [Near(id) for id in ids if id in passing]


def without_copies(token_ids: Sequence[int], others: Iterable[tuple[T, Sequence[int]]]) -> Iterator[T]:
    """Yield, in their order, those of `others` that copy neither the text `token_ids` nor a text yielded before.

    Texts are copies if they have more than a third of the shorter text's runs of 8 tokens in common. A model that reads
    a text for a second time copies from the first, so that the second text's KV is of little use without the first:
    passages of MuSiQue that were encoded after other releases of the same page answered worse than passages encoded
    alone.

    others: objects to yield, each with the token ids of its text
    """
    seen = [_runs(token_ids)]
    for other, ids in others:
        runs = _runs(ids)
        if all(len(runs & before) <= MOST_SHARED * min(len(runs), len(before)) for before in seen):
            seen.append(runs)
            yield other


def _runs(token_ids: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the runs of `RUN` tokens in a text; the text itself if it is shorter."""
    return {tuple(token_ids[start : start + RUN]) for start in range(max(1, len(token_ids) - RUN + 1))}


class Similar(Neighbourhood):
    """A neighbourhood of the chunks with the most similar embeddings, without copies of the chunk or of each other
    (`without_copies`).

    `update` compares the embedding of every recorded chunk with that of every new chunk. It searches the index once for
    each chunk that is new or has a nearer neighbour among the new chunks.
    """

    def _outdated(self, new: VectorBatch) -> list[int]:
        known, found, number = self._table.known(), list[int](), self.choice.number
        for batch in self._documents.embeddings(batch_size=BATCH):
            LIMIT.get().check()
            recorded = [known.get(id) for id in batch.ids.tolist()]
            # The score that a new chunk has to reach to become a neighbour.
            lowest = np.array(
                [-np.inf if record is None or record.number != number else record.lowest for record in recorded]
            )
            outdated = np.isneginf(lowest)
            full = np.flatnonzero(~outdated)
            for start in range(0, len(new.ids) if len(full) else 0, BATCH):
                nearest = (batch.vectors[full] @ new.vectors[start : start + BATCH].T).max(1)
                outdated[full] |= nearest >= lowest[full] - ROUNDING
            found += batch.ids[outdated].tolist()
        return found

    def _find(self, vector_id: int, where: Filter | None = None) -> list[Near]:
        own = next(self._documents.embeddings(after=vector_id - 1, batch_size=1), None)
        chunk = next(iter(self._documents.chunks_by_vector_ids([vector_id])), None)
        if chunk is None or own is None or own.ids[0] != vector_id:
            return []
        # Neighbours are of the chunk's own collection, because its KV depends on their texts.
        name, wanted = chunk.collection, self.choice.number
        there = self._there.setdefault(name, self._documents.seen_by(self._documents.view.only(name)))
        width = FETCH_FACTOR * (wanted + 1)
        while True:
            result = self._retriever.nearest(there, own.vectors[0], width, where)
            scores = dict(zip(result.ids.tolist(), result.scores.tolist(), strict=True))
            others = ((near.vector_id, near.token_ids) for near in self._documents.chunks_by_vector_ids(scores))
            found = [Near(id, scores[id]) for id in without_copies(chunk.token_ids, others)]
            if len(found) >= wanted or len(result.ids) < width or width >= MOST_FETCHED:
                return found[:wanted]
            width *= FETCH_FACTOR


NEIGHBOURHOODS: dict[str, type[Neighbourhood]] = {SIMILARITY: Similar, DOCUMENT: Preceding}
