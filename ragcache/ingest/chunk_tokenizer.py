"""A language model's tokenizer as ingestion uses it: each chunk's text is tokenised alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from ragcache.errors import check_text
from ragcache.prompt import control_tokens, encode_text


class ChunkTokenizer:
    """Tokenises chunks alone: no special tokens added, and none recognised in the text.

    A document that contains "<|im_end|>" gets the ids of those characters, never the control token: a passage must
    not be able to end the prompt that quotes it. Safe to share between threads.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a transformers tokenizer, whose own state stays untouched: a fast tokenizer is copied."""
        self._tokenizer = tokenizer
        self._controls = control_tokens(tokenizer).keys() - {tokenizer.unk_token_id}  # text may become unknown
        self._fast: Tokenizer | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            self._fast = Tokenizer.from_str(backend.to_str())
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = True

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text. Raises PromptError for half of a surrogate pair."""
        if not texts:
            return []
        for text in texts:
            check_text(text)
        if self._fast is not None:
            rows = [encoding.ids for encoding in self._fast.encode_batch(list(texts), add_special_tokens=False)]
        else:
            rows = self._tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        # Some control tokens may remain: those not marked special, and those that the vocabulary itself spells.
        return [
            list(row) if self._controls.isdisjoint(row) else encode_text(self._tokenizer, text)
            for text, row in zip(texts, rows, strict=True)
        ]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of token ids of each text."""
        return [len(ids) for ids in self.encode(texts)]
