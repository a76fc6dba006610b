"""The protocols of embedding models.

All scores in ragcache are inner products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


class Embedder(Protocol):
    """An embedding model as retrieval and ingestion use it. Methods may be called from several threads."""

    @property
    def name(self) -> str:
        """Return the model's name, which is recorded with the index; an embedder of another name is refused."""

    @property
    def dimension(self) -> int: ...

    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> Vectors:
        """Return the vectors of passages: float32 [len(texts), dimension]."""

    def embed_query(self, text: str) -> Vectors:
        """Return the vector of a question: float32 [dimension]."""


@runtime_checkable
class BoundedEmbedder(Embedder, Protocol):
    """An embedder that states how many tokens it reads at once. A longer text is embedded in windows."""

    @property
    def max_tokens(self) -> int: ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, the model's special tokens included."""


@runtime_checkable
class TokenEmbedder(Embedder, Protocol):
    """An embedder that also accepts token ids of its own tokenizer."""

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, without special tokens. Raises ConfigError for ids that do not exist."""


@runtime_checkable
class NestedEmbedder(Embedder, Protocol):
    """An embedder trained so that the beginnings of its vectors are embeddings too (Kusupati et al., 2022)."""

    @property
    def dimensions(self) -> Sequence[int]:
        """Return the lengths to which its vectors may be cut, their full length included."""
