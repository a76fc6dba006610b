"""Texts that are passages already: each becomes a single chunk, unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragcache.errors import ContextTooLongError
from ragcache.ingest.chunk_tokenizer import ChunkTokenizer
from ragcache.ingest.chunker import TextChunk
from ragcache.models.deadline import LIMIT
from ragcache.prompt import exceeds
from ragcache.store.places import Place, PlaceIndex

NO_LIMIT = 1 << 20


class PassthroughSplitter:
    """Replaces the Chunker if the caller's documents are the passages (`ingest(..., split=False)`).

    The text is stored unchanged. The model reads it with exactly one newline at its end, as it reads every chunk, so
    that a passage has the same ids, and the same KV block, wherever it comes from.
    """

    settings: dict[str, Any] = {"chunker": "whole 1"}  # noqa: RUF012

    def __init__(self, tokenizer: Any, max_tokens: int = NO_LIMIT) -> None:
        """Create a splitter.

        tokenizer: a transformers tokenizer
        max_tokens: most tokens that the model can read
        """
        self._tokens = ChunkTokenizer(tokenizer)
        self._max_tokens = max_tokens

    def split(self, text: str, places: Sequence[Place] = ()) -> list[TextChunk]:
        place = PlaceIndex(text, places).between(0, len(text))
        return [TextChunk(text, ids, (), place) for ids in self.encode([text])]

    def chunk_id(self, document_id: str, ordinal: int) -> str:
        return document_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text as a passage. Raises ContextTooLongError for a text that is too long."""
        for text in texts:
            self._check(text)
        return self._tokens.encode([f"{text.rstrip()}\n" for text in texts])

    def _check(self, text: str) -> None:
        if exceeds(text, self._max_tokens, self._count):
            raise ContextTooLongError(
                f"a passage of {len(text):,} characters has more than the {self._max_tokens:,} tokens that the "
                "model can read; cut it into several, or let it be cut (split=True)"
            )

    def _count(self, part: str) -> int:
        LIMIT.get().check()
        return self._tokens.count([part])[0]
