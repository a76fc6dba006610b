"""Rerankers: models that read a question together with a passage, and say how well it answers.

A name is a directory or hub id of a cross-encoder with one score, such as cross-encoder/ms-marco-MiniLM-L6-v2, loaded
by sentence-transformers as its own configuration says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import RerankerError
from ragcache.models.deadline import LIMIT
from ragcache.models.machine import AUTO, find_device
from ragcache.retrieval.embedder import LONG_TEXT, QUESTION, PriorityLock
from ragcache.runtime import team_ends

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

# Pairs in one forward pass; between passes a caller that gave up is noticed.
BATCH = 8


class Reranker(Protocol):
    """A model that orders passages. Methods may be called from several threads."""

    @property
    def name(self) -> str:
        """What requests call it."""
        ...

    def scores(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Scores of the texts, higher for a better answer: float32 [len(texts)]."""
        ...


@dataclass(eq=False, repr=False)
class CrossEncoderReranker:
    """A Reranker over sentence-transformers' CrossEncoder. Scores are logits: a sigmoid would make ties of them."""

    name: str
    _model: CrossEncoder
    _lock: PriorityLock = field(default_factory=PriorityLock)

    def scores(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Raises CancelledError and TimedOutError within `limits.limited`, between batches."""
        # No model reads further than that, and the tokenizer would.
        pairs = [(question[:LONG_TEXT], text[:LONG_TEXT]) for text in texts]
        found = [np.empty(0, np.float32)]
        for start in range(0, len(pairs), BATCH):
            LIMIT.get().check()
            found.append(self._score(pairs[start : start + BATCH]))
        return np.concatenate(found)

    def _score(self, pairs: list[tuple[str, str]]) -> NDArray[np.float32]:
        from torch.nn import Identity

        with self._lock.hold(QUESTION), team_ends():
            logits = self._model.predict(
                pairs, batch_size=BATCH, show_progress_bar=False, activation_fn=Identity(), convert_to_numpy=True
            )
        return np.asarray(logits, dtype=np.float32)


def load_reranker(name: str | Path, device: str = AUTO) -> Reranker:
    """The cross-encoder of this directory or hub id.

    Raises RerankerError when the model is absent, damaged or no cross-encoder with one score.
    """
    from sentence_transformers import CrossEncoder

    try:
        model = CrossEncoder(
            str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else str(name),
            device=str(find_device(device)),
        )
    except Exception as error:  # sentence-transformers and the hub raise any kind
        raise RerankerError(
            f"the reranker {str(name)!r} cannot be loaded ({type(error).__name__}: {error}); give the directory of a "
            "cross-encoder, or a hub id that this machine can reach"
        ) from error
    kinds = getattr(model.config, "architectures", None) or [""]
    if kinds[0].endswith("Model"):  # transformers would give it a last layer of random numbers
        raise RerankerError(f"{name}: this is a {kinds[0]}, which has no score for a pair; give a cross-encoder")
    if model.num_labels != 1:
        raise RerankerError(f"{name}: this model gives {model.num_labels} labels to a pair; give one with one score")
    return CrossEncoderReranker(str(name), model.eval())
