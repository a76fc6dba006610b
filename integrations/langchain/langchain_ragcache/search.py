"""Options of the vector store's searches, and conversion of their hits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from langchain_core.documents import Document
from numpy.typing import NDArray

import ragcache as rc
from langchain_ragcache.documents import to_document
from langchain_ragcache.options import refuse_unknown

Scored = list[tuple[Document, float]]


@dataclass(frozen=True)
class Search:
    """Options of a search. filter: on metadata. score_threshold: least score. handles: add handles to the documents'
    metadata
    """

    filter: Mapping[str, Any] | None = None
    score_threshold: float | None = None
    handles: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the options as a search. Raises ConfigError for an unknown option."""
        refuse_unknown("the search", given, ["k", *(field.name for field in fields(cls))])
        return cls(**given)

    def retrieval(self) -> dict[str, Any]:
        """Return the options of `rc.RagCache.retrieve`."""
        return {"filter": self.filter, "score_threshold": self.score_threshold}

    def document(self, hit: rc.Hit) -> Document:
        return to_document(hit.chunk, hit.handle if self.handles else None)

    def documents(self, hits: Sequence[rc.Hit]) -> list[Document]:
        return [self.document(hit) for hit in hits]

    def scored(self, hits: Sequence[rc.Hit]) -> Scored:
        """Return documents with inner products."""
        return [(self.document(hit), float(hit.score)) for hit in hits]

    def relevant(self, hits: Sequence[rc.Hit], kb: rc.RagCache, question: NDArray[np.float32]) -> Scored:
        """Return documents with relevance in 0..1: the cosine of question and passage, or 0 if it is negative.

        If the embedder normalises, that is the inner product itself; else it is computed from the vectors. For a
        passage longer than the embedder reads, its best window counts. A passage deleted since the search is left out.
        """
        stored = kb.store.documents
        found = [(hit, stored.vectors_of([hit.chunk.vector_id], len(question))[0].vectors) for hit in hits]
        return [(self.document(hit), max(_relevance(question, one) for one in own)) for hit, own in found if len(own)]


def mmr(search: Search, k: int, fetch_k: int, lambda_mult: float) -> dict[str, Any]:
    """Return the options of `rc.RagCache.retrieve` for MMR. A fetch_k below k is raised to k, as elsewhere in
    LangChain.
    """
    return {**search.retrieval(), "mmr_lambda": lambda_mult, "fetch_k": max(k, fetch_k)}


def _relevance(question: NDArray[np.float32], passage: NDArray[np.float32]) -> float:
    lengths = float(np.linalg.norm(question) * np.linalg.norm(passage))
    return min(1.0, max(0.0, float(question @ passage) / lengths)) if lengths else 0.0
