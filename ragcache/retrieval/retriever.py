"""Find the chunks of a store that answer a question."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragcache.errors import ConfigError, PromptError, check_choice, check_least
from ragcache.retrieval.embedder_types import Embedder
from ragcache.retrieval.faiss_kinds import Ids, Vectors
from ragcache.retrieval.mmr import maximal_marginal_relevance
from ragcache.retrieval.open_index import open_index
from ragcache.retrieval.reranker import Reranker
from ragcache.retrieval.search import SEARCHES, Search
from ragcache.retrieval.vector_index import SearchIndex
from ragcache.retrieval.windows import embed_question
from ragcache.seal import UNSEALED, Seal
from ragcache.store.documents import DocumentStore
from ragcache.store.filters import Filter
from ragcache.store.records import Chunk

# Candidates for each result wanted, for MMR and the reranker, and in each ranking that is fused.
FETCH_FACTOR = 5
# If the vectors found belong to fewer chunks than wanted, the search is repeated for this many times as many vectors.
WIDEN = 4
RRF = 60  # k of reciprocal rank fusion
# A search that loses chunks to deletions in other processes is repeated at most this often.
MAX_RETRIES = 5
# Most blocks announced as candidates: reading more blocks before the ranking is final does not pay.
FORESEEN = 16


# A callback that receives the handles of KV blocks that are likely to be read, the likeliest first.
OnCandidates = Callable[[Sequence[str]], None]


class Hit(NamedTuple):
    """A chunk found by a search.

    score:  inner product of the question's vector and the chunk's
    handle: key of the chunk's KV block; None if the block is not computed yet
    """

    chunk: Chunk
    score: float
    handle: str | None


class Ranking(NamedTuple):
    """Chunks in the order of a search, best first.

    ids:    the chunks' vector ids, int64 [n]
    scores: inner products of the question and each chunk's best vector, float32 [n]
    best:   ids of these best vectors, int64 [n]
    """

    ids: Ids
    scores: Vectors
    best: Ids


@dataclass(eq=False, repr=False)
class Retriever:
    """Searches the chunks of a document store. Thread-safe.

    The index is derived from SQL. Before every search the store's generation shows whether other processes have
    committed; if so, the index is brought up to date. The embedding model's name and dimension are recorded in the
    store at first use.
    """

    documents: DocumentStore
    index: SearchIndex
    embedder: Embedder
    reranker: Reranker | None = None

    def __post_init__(self) -> None:
        """Check that the embedder fits the store and the index.

        Raises EmbedderMismatchError if the store was made with another embedder, ConfigError if the index was.
        """
        index, embedder = self.index, self.embedder
        if (index.embedder, index.dimension) != (embedder.name, embedder.dimension):
            raise ConfigError(
                f"the index was made by {index.embedder!r} ({index.dimension} dimensions), not by {embedder.name!r} "
                f"({embedder.dimension}); open it with Retriever.open, which rebuilds it"
            )
        self.documents.bind("embedder", embedder.name)
        self.documents.bind("embedding_dim", embedder.dimension)
        self._refreshing = threading.Lock()

    @classmethod
    def open(
        cls,
        documents: DocumentStore,
        path: Path,
        embedder: Embedder,
        *,
        kind: str = "flat",
        reranker: Reranker | None = None,
        seal: Seal = UNSEALED,
    ) -> Retriever:
        """Return a retriever over the index saved at `path`, brought up to date.

        The index is rebuilt from SQL if the file is absent, damaged, of another seal, or of another kind or embedder.
        Nothing is written, except to the table of kind "pgvector".

        Raises EmbedderMismatchError, ConfigError (kind), StoreNotFoundError.
        """
        index = open_index(documents, path, kind, embedder.name, embedder.dimension, seal)
        retriever = cls(documents, index, embedder, reranker)
        retriever.refresh()
        return retriever

    def retrieve(
        self,
        query: str | Vectors,
        k: int = 5,
        *,
        search: Search = "vector",
        filter: Filter | None = None,
        score_threshold: float | None = None,
        mmr_lambda: float | None = None,
        fetch_k: int | None = None,
        rerank: bool | None = None,
        on_candidates: OnCandidates | None = None,
        documents: DocumentStore | None = None,
    ) -> list[Hit]:
        """Return the k chunks that answer the question best, best first, or all chunks if the store has fewer.

        query:           text, or the question's vector ([dimension]), for which only vector search is possible
        search:          "vector": by embedding; "text": by the question's words (`DocumentStore.search_text`), leaving
                         out chunks with none of these words; "hybrid": by both rankings, fused by reciprocal ranks
                         (Cormack et al., SIGIR 2009). A hit's score is the inner product in every case
        filter:          metadata filter; only chunks that pass it are found
        score_threshold: leave out chunks with a lower inner product
        mmr_lambda:      choose for variety too (maximal marginal relevance): 1 is the plain ranking, 0 variety alone.
                         Hits are then in the order chosen
        fetch_k:         number of candidates for MMR or the reranker; 5 * k when None
        rerank:          have the reranker choose and order the k hits by reading each candidate with the question.
                         None: rerank if the retriever has a reranker, the query is text and mmr_lambda is None. A
                         hit's score stays the inner product
        on_candidates:   called with the handles of the k nearest chunks (FORESEEN at most) as soon as they are found,
                         before their texts are read and before score_threshold and MMR are applied; called again if
                         the search has to be repeated
        documents:       another view of the same documents; chunks that the view does not show are not found

        Raises PromptError (empty question), ConfigError (numbers out of range, or a vector if words are needed), and
        FilterError (also if nothing passes the filter because no chunk has a field that it names).
        """
        _check_options(query, k, search, mmr_lambda, fetch_k, rerank)
        reranker = self._reranker(rerank, mmr_lambda) if isinstance(query, str) else None
        count = k if reranker is None and mmr_lambda is None else fetch_k or FETCH_FACTOR * k
        question, vector = (query, embed_question(self.embedder, query)) if isinstance(query, str) else ("", query)
        seen = self.documents if documents is None else documents
        rank = partial(self._rank, seen, question, vector, search, filter, count)
        found, chunks = self._search(seen, rank, min(k, FORESEEN), on_candidates)
        if filter and not len(found.ids):
            seen.refuse_unknown_fields(filter)
        if score_threshold is not None:
            found = _keep(found, np.flatnonzero(found.scores >= score_threshold))
        if mmr_lambda is not None:
            rows, vectors = self.index.vectors_present(found.best)
            found = _keep(found, rows)
            found = _keep(found, maximal_marginal_relevance(found.scores, vectors, k, mmr_lambda))
        by_id = {chunk.vector_id: chunk for chunk in chunks}
        pairs = zip(found.ids.tolist(), found.scores.tolist(), strict=True)
        hits = [Hit(by_id[id], score, by_id[id].handle) for id, score in pairs if id in by_id]
        if reranker is None or not hits:
            return hits
        scores = reranker.scores(question, [hit.chunk.text for hit in hits])
        return [hits[row] for row in np.argsort(-scores, kind="stable")[:k]]  # equal scores keep the search's order

    def nearest(self, seen: DocumentStore, vector: Vectors, k: int, where: Filter | None) -> Ranking:
        """Return the k chunks with the nearest vectors, or all chunks if the store has fewer.

        A chunk that is too long for the embedder has a vector for each of its windows, and the nearest window counts.
        If the windows of a chunk crowd out other chunks, more vectors are searched for, at most all.
        """
        width = k
        while True:
            ids, scores = self.index.find(seen, vector, width, where)
            chunks = seen.chunks_of_vectors(ids)
            rows = np.sort(np.unique(chunks, return_index=True)[1])[:k]
            if len(rows) == k or len(ids) < width:
                return Ranking(chunks[rows], scores[rows], ids[rows])
            width *= WIDEN

    def refresh(self) -> bool:
        """Bring the index up to date with commits since the last refresh. Return whether there were any."""
        if self.documents.generation() == self.index.generation:
            return False
        with self._refreshing:
            # Read before the vectors: at worst the index is newer than its generation says, and is refreshed again.
            generation = self.documents.generation()
            if generation == self.index.generation:
                return False
            self.index.follow(self.documents)
            self.index.generation = generation
        return True

    def apply(self, added: Sequence[int], vectors: Vectors, removed: Collection[int]) -> None:
        """Update the index with a commit that the caller has just made, at less cost than `refresh`.

        The caller still holds the writer lock.

        added:   ids of the new vectors
        vectors: the new vectors, [len(added), dimension]
        removed: ids of removed vectors
        """
        with self._refreshing:
            self.index.take(self.documents, added, vectors, removed)
            # Each commit raises the generation by 1. If there were other commits too, `refresh` takes them in.
            generation = self.documents.generation()
            if generation == self.index.generation + 1:
                self.index.generation = generation

    def save(self, path: Path) -> None:
        """Write the index to `path`, atomically. Raises StoreFullError, StoreReadOnlyError."""
        with self._refreshing:
            self.index.save(path)

    def _search(
        self, seen: DocumentStore, rank: Callable[[], Ranking], nearest: int, on_candidates: OnCandidates | None
    ) -> tuple[Ranking, list[Chunk]]:
        """Return the ranking and its chunks.

        If a chunk is deleted between the search and its look-up, the search is repeated, so that no result is missing.
        """
        for _ in range(MAX_RETRIES):
            self.refresh()
            found = rank()
            ids = found.ids.tolist()
            if on_candidates is not None:
                on_candidates(seen.handles_by_vector_ids(ids[:nearest]))
            chunks = seen.chunks_by_vector_ids(ids)
            if len(chunks) == len(ids):
                break
        return found, chunks

    def _rank(
        self, seen: DocumentStore, question: str, vector: Vectors, search: Search, where: Filter | None, k: int
    ) -> Ranking:
        if search == "vector":
            return self.nearest(seen, vector, k, where)
        rankings = [seen.search_text(question, FETCH_FACTOR * k, where)]
        if search == "hybrid":
            rankings.insert(0, self.nearest(seen, vector, FETCH_FACTOR * k, where).ids.tolist())
        ranked = fused_ranks(rankings)[:k]
        (ids, vectors), chunks = seen.vectors_of(ranked, self.index.dimension)
        scores = vectors @ np.asarray(vector, np.float32)
        best = {int(chunks[row]): row for row in np.argsort(scores, kind="stable")}  # a chunk's last row is its best
        rows = [best[id] for id in ranked if id in best]
        return Ranking(chunks[rows], scores[rows], ids[rows])

    def _reranker(self, rerank: bool | None, mmr_lambda: float | None) -> Reranker | None:
        """Return the reranker that orders the hits of a text question, or None."""
        if not rerank:
            return self.reranker if rerank is None and mmr_lambda is None else None
        if self.reranker is None:
            raise ConfigError(
                "rerank is True and there is no reranker; open the store with one: reranker=, --reranker", "rerank"
            )
        if mmr_lambda is not None:
            raise ConfigError("mmr_lambda and rerank both choose among the candidates; give one of them", "mmr_lambda")
        return self.reranker


def fused_ranks(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Return all ids by falling sum of 1 / (60 + rank) (reciprocal rank fusion), equal sums by rising id."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, id in enumerate(ranking, start=1):
            scores[id] = scores.get(id, 0.0) + 1 / (RRF + rank)
    return sorted(scores, key=lambda id: (-scores[id], id))


def _keep(found: Ranking, rows: Ids | list[int]) -> Ranking:
    kept = np.asarray(rows, np.int64)
    return Ranking(found.ids[kept], found.scores[kept], found.best[kept])


def _check_options(
    query: str | Vectors, k: int, search: Search, mmr_lambda: float | None, fetch_k: int | None, rerank: bool | None
) -> None:
    if not isinstance(query, str):
        if search != "vector":
            raise ConfigError(f"search is {search!r} and the question is a vector; give its text", "search")
        if rerank:
            raise ConfigError("rerank is True and the question is a vector, which no reranker reads; give its text")
    elif not query.strip():
        raise PromptError("the question is empty; ask something")
    check_choice("search", search, SEARCHES)
    check_least("k", k, 1)
    if mmr_lambda is not None and not 0 <= mmr_lambda <= 1:
        raise ConfigError(f"mmr_lambda is {mmr_lambda}; it must lie in 0..1", "mmr_lambda")
    if fetch_k is not None and fetch_k < k:
        raise ConfigError(f"fetch_k is {fetch_k}; it must be at least k ({k})", "fetch_k")
