"""Windows of texts that are longer than an embedder reads at once: together they hold all words of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ragcache.errors import ContextTooLongError
from ragcache.models.deadline import LIMIT
from ragcache.prompt import exceeds
from ragcache.retrieval.embedder_types import BoundedEmbedder, Embedder, Vectors

# Most windows of a question. MiniLM takes 2 to 4 s of processor time for them, about a second on four cores.
QUESTION_WINDOWS = 16


class Window(NamedTuple):
    """A piece of a text, and its number of tokens."""

    text: str
    length: int


# Returns the number of tokens of each text.
Count = Callable[[Sequence[str]], Sequence[int]]


def windows_of(text: str, length: int, room: int, count: Count) -> list[Window]:
    """Cut a text of `length` tokens into windows of at most `room` tokens, at spaces if possible."""
    if length <= room or len(text) < 2:
        return [Window(text, length)]
    LIMIT.get().check()
    parts = min(len(text), length // room + 1)
    ends = [len(text) * part // parts for part in range(1, parts)]
    spaces = [max(text.rfind(space, end - len(text) // (2 * parts), end) for space in " \n") + 1 for end in ends]
    cuts = [0, *(space or end for space, end in zip(spaces, ends, strict=True)), len(text)]
    pieces = [piece for piece in (text[a:b] for a, b in pairwise(cuts)) if piece.strip()] or [text[: cuts[1]]]
    sizes = zip(pieces, count(pieces), strict=True)
    return [window for piece, size in sizes for window in windows_of(piece, size, room, count)]


def windowed(
    texts: Sequence[str], room: int, count: Count, embed: Callable[[Sequence[Window]], Vectors]
) -> list[Vectors]:
    """Return the vectors of each text, float32 [vectors, dimension].

    A text of more than `room` tokens has the mean of its windows' vectors, followed by the windows' vectors. The mean
    is weighted by the windows' lengths, and normalised if the windows' vectors are. A shorter text has a single vector.
    """
    cut = [windows_of(text, length, room, count) for text, length in zip(texts, count(texts), strict=True)]
    vectors = np.asarray(embed([window for windows in cut for window in windows]), np.float32)
    starts = [0, *np.cumsum([len(windows) for windows in cut], dtype=int).tolist()]
    rows = (vectors[start:end] for start, end in pairwise(starts))
    return [own if len(own) == 1 else _below_mean(own, windows) for own, windows in zip(rows, cut, strict=True)]


def _below_mean(vectors: Vectors, windows: Sequence[Window]) -> Vectors:
    mean = np.average(vectors, axis=0, weights=[window.length for window in windows])
    if np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3):
        mean /= max(float(np.linalg.norm(mean)), float(np.finfo(np.float32).tiny))
    return np.concatenate([mean[None], vectors], dtype=np.float32)


def first_rows(vectors: Sequence[Vectors], dimension: int) -> Vectors:
    return np.stack([own[0] for own in vectors]) if vectors else np.empty((0, dimension), np.float32)


def embed_passages(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    """Return a vector for each text: float32 [len(texts), dimension].

    The vector of a text that is longer than the embedder's limit is the mean over its windows; see `windowed`.
    """
    return first_rows(embed_windows(embedder, texts, embedder.embed), embedder.dimension)


def embed_question(embedder: Embedder, text: str) -> Vectors:
    """Return the vector of a question: float32 [dimension]; for a long question the mean over its windows.

    Raises ContextTooLongError; see `check_question`.
    """
    if isinstance(embedder, BoundedEmbedder):
        check_question(text, embedder.max_tokens, embedder.count_tokens)
    [vectors] = embed_windows(embedder, [text], lambda some: np.stack([embedder.embed_query(part) for part in some]))
    vector: Vectors = vectors[0]
    return vector


def embed_windows(embedder: Embedder, texts: Sequence[str], embed: Callable[[Sequence[str]], Vectors]) -> list[Vectors]:
    """Return the vectors of each text, computed by `embed`, float32 [vectors, dimension].

    A text has a single vector or, if it is longer than the embedder's limit, the mean of its windows' vectors followed
    by the windows' vectors.
    """
    if not isinstance(embedder, BoundedEmbedder):
        return list(np.asarray(embed(texts), np.float32)[:, None])
    limit, count = embedder.max_tokens, embedder.count_tokens
    return windowed(texts, limit, count, lambda windows: embed([window.text for window in windows]))


def check_question(text: str, room: int, count: Count) -> None:
    """Raise ContextTooLongError for a question of more than QUESTION_WINDOWS windows of `room` tokens."""
    if is_longer(text, QUESTION_WINDOWS * room, count):
        raise ContextTooLongError(
            f"the question of {len(text):,} characters has more than the {QUESTION_WINDOWS * room:,} tokens that the "
            "embedder reads of one; ask a shorter one, and give a text that it is about as a passage or a document"
        )


def is_longer(text: str, most: int, count: Count) -> bool:
    return exceeds(text, most, lambda part: count([part])[0]) or count([text])[0] > most


def fits_window(embedder: Embedder, text: str) -> bool:
    """Return whether the embedder reads the text at once rather than in windows."""
    return not isinstance(embedder, BoundedEmbedder) or embedder.count_tokens([text])[0] <= embedder.max_tokens
