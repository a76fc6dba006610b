"""Maximal marginal relevance: relevant passages that do not repeat each other."""

from __future__ import annotations

import numpy as np

from ragcache.retrieval.faiss_kinds import Vectors


def maximal_marginal_relevance(scores: Vectors, vectors: Vectors, k: int, mmr_lambda: float) -> list[int]:
    """Return the positions of at most k candidates, in the order chosen (Carbonell and Goldstein, 1998, equation 1).

    The next candidate maximises mmr_lambda * score - (1 - mmr_lambda) * max(inner product with a chosen candidate), so
    mmr_lambda=1 is the plain ranking. Ties go to the earlier candidate.

    scores: [n], inner products with the question
    vectors: [n, dimension]
    """
    chosen: list[int] = []
    if len(scores) == 0:
        return chosen
    similar = np.full(len(scores), -np.inf, dtype=np.float32)
    left = np.ones(len(scores), dtype=bool)
    while left.any() and len(chosen) < k:
        # Before the first choice there is no redundancy, so the most relevant candidate wins whatever the weight.
        value = mmr_lambda * scores - (1 - mmr_lambda) * similar if chosen else scores
        best = int(np.argmax(np.where(left, value, -np.inf)))
        chosen.append(best)
        left[best] = False
        similar = np.maximum(similar, vectors @ vectors[best])
    return chosen
