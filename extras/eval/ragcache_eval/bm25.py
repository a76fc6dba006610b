"""BM25 over a small corpus: finds similar passages without a model, and the same in every process."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class BM25:
    """Okapi BM25 (Robertson and Zaragoza 2009) with the usual k1 and b."""

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [Counter(_words(text)) for text in texts]
        lengths = np.array([sum(bag.values()) for bag in bags], dtype=np.float64)
        mean = lengths.mean() if len(bags) else 1.0
        self._norm = K1 * (1 - B + B * lengths / max(mean, 1.0))
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, bag in enumerate(bags):
            for word, count in bag.items():
                self._postings[word].append((place, count))
        self._count = len(bags)

    def ranked(self, query: str) -> list[int]:
        """Return the places of all texts, best first; ties keep the corpus's order."""
        scores = np.zeros(self._count)
        for word in sorted(set(_words(query))):
            postings = self._postings.get(word, [])
            weight = math.log(1 + (self._count - len(postings) + 0.5) / (len(postings) + 0.5))
            for place, count in postings:
                scores[place] += weight * count * (K1 + 1) / (count + self._norm[place])
        return [int(place) for place in np.argsort(-scores, kind="stable")]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
