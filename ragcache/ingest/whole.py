"""Texts that are passages already: one chunk each, kept as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragcache.ingest.chunker import TextChunk
from ragcache.ingest.tokens import ChunkTokenizer


class WholeTexts:
    """Stands in for a Chunker where the caller's own documents are the passages (`ingest(..., split=False)`).

    The text is stored as it was given. The model reads it with exactly one newline at its end, as it reads every chunk,
    so that a passage has the same ids, and the same KV block, whoever hands it over.
    """

    settings: dict[str, Any] = {"chunker": "whole 1"}  # noqa: RUF012

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a transformers tokenizer."""
        self._tokens = ChunkTokenizer(tokenizer)

    def split(self, text: str) -> list[TextChunk]:
        return [TextChunk(text, ids, ()) for ids in self.encode([text])]

    def chunk_id(self, document_id: str, ordinal: int) -> str:
        return document_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as a passage."""
        return self._tokens.encode([f"{text.rstrip()}\n" for text in texts])
