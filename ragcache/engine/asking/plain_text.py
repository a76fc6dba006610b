"""Stored passages that come back as plain text, whose KV is of no use there."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable

from ragcache.store.records import Chunk

log = logging.getLogger(__name__)
# What the store handed out last is what a chain joins into its next prompts: enough for many of them side by side.
REMEMBERED = 256
# A question may well quote a line.
LEAST_CHARACTERS = 100


class PlainTextWatch:
    """Remembers the passages that were handed out last, and says once that a prompt holds some of them as text.

    The look is exact and bounded: it searches a prompt for REMEMBERED texts, and for none once it has spoken. A passage
    that was changed, or came from elsewhere, is no stored one. Thread-safe.
    """

    def __init__(self) -> None:
        self._texts: deque[str] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()
        self._has_spoken = False

    def handed_out(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            self._texts.extend(chunk.text.strip() for chunk in chunks)

    def forget(self) -> None:
        """Let go of every text: documents were deleted."""
        with self._lock:
            self._texts.clear()

    def look(self, prompt: Iterable[str]) -> None:
        """prompt: the text of a call, without the passages that it gives as such."""
        if self._has_spoken:
            return
        with self._lock:
            texts = {text for text in self._texts if text}
        parts = [part for part in prompt if len(part) >= LEAST_CHARACTERS]
        found = [text for text in texts if any(text in part for part in parts)]
        if sum(map(len, found)) < LEAST_CHARACTERS:
            return
        self._has_spoken = True
        log.warning(
            "a prompt holds %d stored passages as plain text, which the model reads anew: their KV is not used. Keep "
            "passages apart: create_fused_documents_chain in LangChain, FusedSynthesizer in LlamaIndex, hits or "
            "rc.Passage among the parts of a message or prompt in Python, ragcache.documents in a request. This is "
            "said once",
            len(found),
        )
