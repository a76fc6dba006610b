"""Stored passages that come back as plain text: they are found by their text, and read from their KV."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator

from ragcache.engine.asking.passage import Passage
from ragcache.store.records import Chunk

log = logging.getLogger(__name__)
# What the store handed out last is what a chain joins into its next prompts: enough for many of them side by side.
REMEMBERED = 256
# A question may well quote a line: of all that is found in a text, and of each.
LEAST_CHARACTERS, LEAST_EACH = 100, 20


class HandedOut:
    """Remembers the passages that were handed out last, and finds them in the text of prompts.

    The look is exact and bounded: it searches a text for REMEMBERED passages. A passage that was changed, or came from
    elsewhere, is no stored one. Thread-safe.
    """

    def __init__(self) -> None:
        self._passages: deque[Passage] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()
        self._has_spoken = False

    def add(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            self._passages.extend(Passage(chunk.text.strip(), chunk.id, chunk.handle) for chunk in chunks)

    def forget(self) -> None:
        """Let go of every text: documents were deleted."""
        with self._lock:
            self._passages.clear()

    def cut(self, text: str, most: int | None = None) -> list[str | Passage]:
        """The text with its stored passages cut out; all of it where there is none worth it, or more than `most`.

        A line break behind a passage goes with it: passages are read with one.
        """
        parts: list[str | Passage] = []
        done = 0
        for start, passage in self._spans(text):
            if start < done:
                continue  # within a longer one
            parts += [text[done:start], passage] if start > done else [passage]
            done = start + len(passage.text)
            done += text[done : done + 1] == "\n"
        found = [part for part in parts if isinstance(part, Passage)]
        if sum(len(one.text) for one in found) < LEAST_CHARACTERS or (most is not None and len(found) > most):
            return [text]
        return [*parts, text[done:]] if done < len(text) else parts

    def warn(self, prompt: Iterable[str]) -> None:
        """Say once that stored passages come as text to a method that could have used their KV.

        prompt: the text of a call, without the passages that it gives as such
        """
        if self._has_spoken:
            return
        found = [part for text in prompt for part in self.cut(text) if isinstance(part, Passage)]
        if not found:
            return
        self._has_spoken = True
        log.warning(
            "a prompt holds %d stored passages as plain text, which the model reads anew: their KV is not used. Keep "
            "passages apart: create_fused_documents_chain in LangChain, FusedSynthesizer in LlamaIndex, hits or "
            "rc.Passage among the parts of a message or prompt in Python, ragcache.documents in a request. This is "
            "said once",
            len(found),
        )

    def _spans(self, text: str) -> list[tuple[int, Passage]]:
        """Where passages begin, in order, of those that begin together the longest first."""
        if len(text) < LEAST_CHARACTERS:
            return []
        with self._lock:
            passages = {one.text: one for one in self._passages if len(one.text) >= LEAST_EACH}
        found = [(start, one) for one in passages.values() for start in _places(text, one.text)]
        return sorted(found, key=lambda span: (span[0], -len(span[1].text)))


def _places(text: str, part: str) -> Iterator[int]:
    start = text.find(part)
    while start >= 0:
        yield start
        start = text.find(part, start + len(part))
