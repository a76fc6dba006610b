"""What a search of the vector store may be told, and what its hits become."""

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
    """filter: on metadata. score_threshold: least score. handles: attach the handle to each document's metadata."""

    filter: Mapping[str, Any] | None = None
    score_threshold: float | None = None
    handles: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for an option that there is not."""
        refuse_unknown("the search", given, ["k", *(field.name for field in fields(cls))])
        return cls(**given)

    def retrieval(self) -> dict[str, Any]:
        """Options of `rc.RagCache.retrieve`."""
        return {"filter": self.filter, "score_threshold": self.score_threshold}

    def document(self, hit: rc.Hit) -> Document:
        return to_document(hit.chunk, hit.handle if self.handles else None)

    def documents(self, hits: Sequence[rc.Hit]) -> list[Document]:
        return [self.document(hit) for hit in hits]

    def scored(self, hits: Sequence[rc.Hit]) -> Scored:
        """Documents with inner products."""
        return [(self.document(hit), float(hit.score)) for hit in hits]

    def relevant(self, hits: Sequence[rc.Hit], kb: rc.RagCache, question: NDArray[np.float32]) -> Scored:
        """Documents with relevance in 0..1: the cosine of question and passage, 0 where it is negative.

        Where the embedder normalises, that is the inner product itself; elsewhere it is computed from the vectors. Of a
        passage longer than the embedder reads the best window counts. A passage that was deleted since it was found is
        left out.
        """
        stored = kb.store.documents
        found = [(hit, stored.vectors_of([hit.chunk.vector_id], len(question))[0].vectors) for hit in hits]
        return [(self.document(hit), max(_relevance(question, one) for one in own)) for hit, own in found if len(own)]


def mmr(search: Search, k: int, fetch_k: int, lambda_mult: float) -> dict[str, Any]:
    """Options of `rc.RagCache.retrieve`. As elsewhere in LangChain, a fetch_k below k is no mistake."""
    return {**search.retrieval(), "mmr_lambda": lambda_mult, "fetch_k": max(k, fetch_k)}


def _relevance(question: NDArray[np.float32], passage: NDArray[np.float32]) -> float:
    lengths = float(np.linalg.norm(question) * np.linalg.norm(passage))
    return min(1.0, max(0.0, float(question @ passage) / lengths)) if lengths else 0.0
