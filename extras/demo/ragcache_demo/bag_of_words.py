"""A test double: an embedder without a model."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(eq=False)
class BagOfWords:
    """An embedder for tests of chains built on ragcache: a word is a fixed random direction, and a text is the
    normalised sum of its words' directions.

    Its vectors are the same in every process, and texts with words in common are near to each other.
    """

    name: str = "bag-of-words"
    dimension: int = 24

    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> NDArray[np.float32]:
        return np.array([self.embed_query(text) for text in texts], np.float32).reshape(len(texts), self.dimension)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        words = re.findall(r"\w+", text.lower()) or ["-"]
        total = np.sum([self._direction(word) for word in words], axis=0)
        return np.asarray(total / np.linalg.norm(total), dtype=np.float32)

    def _direction(self, word: str) -> NDArray[np.float64]:
        return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(self.dimension)
