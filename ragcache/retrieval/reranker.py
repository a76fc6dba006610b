"""Rerankers: models that read a question together with a passage and score how well the passage answers it.

A reranker's name is the directory or hub id of a cross-encoder with a single score, such as
cross-encoder/ms-marco-MiniLM-L6-v2. sentence-transformers loads it according to the model's configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import RerankerError
from ragcache.models.deadline import LIMIT
from ragcache.models.machine import AUTO, find_device
from ragcache.retrieval.embedder import LONG_TEXT, NO_LIMIT_TOKENS, fast_tokenizer, text_lengths
from ragcache.retrieval.priority_lock import QUESTION, PriorityLock
from ragcache.retrieval.windows import Window, is_longer, windows_of
from ragcache.runtime import team_ends

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

log = logging.getLogger(__name__)


# Pairs in one forward pass. Cancellation is checked between passes.
PAIRS = 8


class Reranker(Protocol):
    """A model that orders passages. Methods may be called from several threads."""

    @property
    def name(self) -> str:
        """Return the name by which requests refer to the reranker."""

    def scores(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the scores of the texts, higher for a better answer: float32 [len(texts)]."""


@dataclass(eq=False, repr=False)
class CrossEncoderReranker:
    """A Reranker over sentence-transformers' CrossEncoder. Scores are logits, as a sigmoid would round them to ties."""

    name: str
    _model: CrossEncoder
    _lock: PriorityLock = field(default_factory=PriorityLock)

    def __post_init__(self) -> None:
        self._tokenizer = fast_tokenizer(self._model)
        self._limit = self._model.max_seq_length or NO_LIMIT_TOKENS
        self._has_cut = False

    def scores(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the texts' scores.

        A text that does not fit beside the question gets the score of its best window. A question is cut if it would
        leave texts less than a quarter of the model's window.

        Raises CancelledError and TimedOutError under `deadline.limited`, between batches.
        """
        question = self._beginning(question)
        cut = self._cut(question, texts)
        pairs = [(question, window.text) for windows in cut for window in windows]
        found = [np.empty(0, np.float32)]
        for start in range(0, len(pairs), PAIRS):
            LIMIT.get().check()
            found.append(self._score(pairs[start : start + PAIRS]))
        ends = np.cumsum([len(windows) for windows in cut])[:-1]
        return np.array([own.max() for own in np.split(np.concatenate(found), ends) if len(own)], np.float32)

    def _cut(self, question: str, texts: Sequence[str]) -> list[list[Window]]:
        count = partial(text_lengths, self._tokenizer)
        room = self._limit - count([question])[0] - 2  # special tokens of a pair
        return [windows_of(text, length, room, count) for text, length in zip(texts, count(texts), strict=True)]

    def _beginning(self, question: str) -> str:
        """Return the question, cut if needed so that texts have a quarter of the model's window."""
        most = self._limit - self._limit // 4 - 2
        if not is_longer(question, most, partial(text_lengths, self._tokenizer)):
            return question
        if not self._has_cut:
            self._has_cut = True
            log.warning(
                "a question of %d characters is longer than the reranker %r reads beside a passage: it reads the first "
                "%d tokens of such questions; ask shorter ones, or with rerank=False",
                len(question),
                self.name,
                most,
            )
        if self._tokenizer is None:
            return question[: 4 * (most - 1)]
        offsets = self._tokenizer.encode(question[:LONG_TEXT], add_special_tokens=False).offsets[: most - 2]
        return question[: offsets[-1][1]] if offsets else ""

    def _score(self, pairs: list[tuple[str, str]]) -> NDArray[np.float32]:
        from torch.nn import Identity

        with self._lock.hold(QUESTION), team_ends():
            logits = self._model.predict(
                pairs, batch_size=PAIRS, show_progress_bar=False, activation_fn=Identity(), convert_to_numpy=True
            )
        return np.asarray(logits, dtype=np.float32)


def load_reranker(name: str | Path, device: str = AUTO) -> Reranker:
    """Load the cross-encoder of this directory or hub id.

    Raises RerankerError if the model is absent, damaged or not a cross-encoder with a single score.
    """
    from sentence_transformers import CrossEncoder

    try:
        model = CrossEncoder(
            str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else str(name),
            device=str(find_device(device)),
            trust_remote_code=False,
        )
    except Exception as error:  # sentence-transformers and the hub raise errors of any kind
        raise RerankerError(
            f"the reranker {str(name)!r} cannot be loaded ({type(error).__name__}: {error}); give the directory of a "
            "cross-encoder, or a hub id that this machine can reach"
        ) from error
    kinds = getattr(model.config, "architectures", None) or [""]
    if kinds[0].endswith("Model"):  # transformers would add a last layer with random weights
        raise RerankerError(f"{name}: this is a {kinds[0]}, which has no score for a pair; give a cross-encoder")
    if model.num_labels != 1:
        raise RerankerError(f"{name}: this model gives {model.num_labels} labels to a pair; give one with one score")
    return CrossEncoderReranker(str(name), model.eval())
