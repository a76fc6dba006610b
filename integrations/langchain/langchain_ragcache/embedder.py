"""LangChain's embeddings as the embedder of a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from ragcache.errors import EmbedderError

Vectors = NDArray[np.float32]
# Attributes in which LangChain's embeddings keep the name of their model.
MODEL_ATTRIBUTES = ("model", "model_name", "model_id", "deployment", "repo_id")
PROBE = "dimension"
PREFIX = "langchain:"  # of the names that `_name` makes


class LangChainEmbedder:
    """An `rc.Embedder` over LangChain's `Embeddings`.

    name:      recorded in the store, which later refuses another name; by default the class and its model's name, so
               that the same kind of embeddings has the same name in every process
    dimension: length of the vectors; by default found by embedding a text at first use
    normalize: scale vectors to length 1, so that the store's scores (inner products) are cosines. False keeps them as
               they are, for models trained for inner products

    Raises EmbedderError when the vectors have a wrong shape or are not finite.
    """

    def __init__(
        self, embeddings: Embeddings, *, name: str | None = None, dimension: int | None = None, normalize: bool = True
    ) -> None:
        if not isinstance(embeddings, Embeddings):
            raise EmbedderError(f"{embeddings!r}: LangChain Embeddings are expected here")
        self.embeddings = embeddings
        self.normalize = normalize
        self.name = name or _name(embeddings, normalize)
        self._dimension = dimension
        self._lock = threading.Lock()

    @property
    def dimension(self) -> int:
        with self._lock:
            if self._dimension is None:
                self._dimension = len(self.embeddings.embed_query(PROBE))
            return self._dimension

    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> Vectors:
        """Return the vectors of passages, float32 [len(texts), dimension], embedded in batches of at most `batch_size`
        texts.
        """
        found = [np.empty((0, self.dimension), np.float32)]
        for start in range(0, len(texts), batch_size):
            batch = list(texts[start : start + batch_size])
            found.append(self._checked(self.embeddings.embed_documents(batch), len(batch)))
        return np.concatenate(found)

    def embed_query(self, text: str) -> Vectors:
        """Return the vector of a question, float32 [dimension]."""
        vector: Vectors = self._checked([self.embeddings.embed_query(text)], 1)[0]
        return vector

    def scaled(self, vectors: Vectors) -> Vectors:
        """Return vectors [..., dimension] as the store keeps them: of length 1 if `normalize`."""
        if not self.normalize:
            return vectors
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        return np.asarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)

    def _checked(self, found: Sequence[Sequence[float]], count: int) -> Vectors:
        try:
            vectors = np.asarray(found, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise EmbedderError(f"{self.name}: the vectors are no rectangle of numbers ({error})") from error
        if vectors.shape != (count, self.dimension):
            raise EmbedderError(
                f"{self.name}: vectors of shape {list(vectors.shape)} came back for {count} texts; "
                f"[{count}, {self.dimension}] is expected"
            )
        if not np.isfinite(vectors).all():
            raise EmbedderError(f"{self.name}: a vector holds a value that is not finite")
        return self.scaled(vectors)


def _name(embeddings: Embeddings, normalize: bool) -> str:
    """Return a name that is the same in every process for embeddings of the same class and model."""
    kind = type(embeddings)
    stated = (getattr(embeddings, attribute, None) for attribute in MODEL_ATTRIBUTES)
    model = next((value for value in stated if isinstance(value, str) and value), "")
    parts = [f"{kind.__module__}.{kind.__qualname__}", model, "" if normalize else "unscaled"]
    return PREFIX + ":".join(part for part in parts if part)
