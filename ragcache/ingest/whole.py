"""Texts that are passages already: one chunk each, kept as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragcache.errors import ContextTooLongError
from ragcache.ingest.chunker import TextChunk
from ragcache.ingest.tokens import ChunkTokenizer
from ragcache.models.deadline import LIMIT

# Characters of a long text that are counted at once.
PART = 1 << 16
NO_LIMIT = 1 << 20


class WholeTexts:
    """Stands in for a Chunker where the caller's own documents are the passages (`ingest(..., split=False)`).

    The text is stored as it was given. The model reads it with exactly one newline at its end, as it reads every chunk,
    so that a passage has the same ids, and the same KV block, whoever hands it over.
    """

    settings: dict[str, Any] = {"chunker": "whole 1"}  # noqa: RUF012

    def __init__(self, tokenizer: Any, max_tokens: int = NO_LIMIT) -> None:
        """tokenizer: a transformers tokenizer. max_tokens: most that the model can read."""
        self._tokens = ChunkTokenizer(tokenizer)
        self._max_tokens = max_tokens

    def split(self, text: str) -> list[TextChunk]:
        return [TextChunk(text, ids, ()) for ids in self.encode([text])]

    def chunk_id(self, document_id: str, ordinal: int) -> str:
        return document_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as a passage. Raises ContextTooLongError for one that is far too long to be tokenised."""
        for text in texts:
            self._check(text)
        return self._tokens.encode([f"{text.rstrip()}\n" for text in texts])

    def _check(self, text: str) -> None:
        """Tokenising takes a hundred times a text's size: of a long one, parts are counted until it is twice too long,
        since cutting adds tokens to some."""
        counted = 0
        for start in range(0, len(text) if len(text) > PART else 0, PART):
            LIMIT.get().check()
            counted += self._tokens.count([text[start : start + PART]])[0]
            if counted > 2 * self._max_tokens:
                raise ContextTooLongError(
                    f"a passage of {len(text):,} characters has more than the {self._max_tokens:,} tokens that the "
                    "model can read; cut it into several, or let it be cut (split=True)"
                )
