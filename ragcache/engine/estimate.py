"""Estimates of what work takes: a full prefill, by real passes, and an ingestion's KV on disk, by its text."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ragcache.codecs import get_codec
from ragcache.ingest.document import Document
from ragcache.ingest.pipeline import Input
from ragcache.ingest.readers import OWN, SourceFile, find_files
from ragcache.ingest.report import bytes_text
from ragcache.models.hub import BUNDLED
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import encode_text

# A shorter pass is mostly what any pass costs: it says little of a long one.
LEAST_TOKENS = 128


class PrefillEstimate:
    """Time that a full prefill would take, by reads that the engine did anyway. Thread-safe.

    The fastest read of each length counts (lengths of one power of two are alike): whatever else ran at the same time
    can only have slowed the others. Between the lengths that were read seconds a token are interpolated, beyond them
    they stay what they are, which leaves out the attention of a longer prompt: the estimate is rather too low.

    samples: reads that it was learnt from
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fastest: dict[int, tuple[int, float]] = {}  # by power of two: tokens, seconds a token
        self.samples = 0

    def add(self, num_tokens: int, seconds: float, sequences: int = 1) -> None:
        """One pass over `sequences` of so many tokens each. A pass of few tokens tells nothing."""
        if num_tokens * sequences < LEAST_TOKENS:
            return
        rate = seconds / (num_tokens * sequences)
        with self._lock:
            self.samples += 1
            known = self._fastest.get(num_tokens.bit_length())
            if known is None or rate < known[1]:
                self._fastest[num_tokens.bit_length()] = (num_tokens, rate)

    def seconds(self, num_tokens: int) -> float | None:
        """None until something was read."""
        with self._lock:
            points = sorted(self._fastest.values())
        if not points:
            return None
        lengths, rates = zip(*points, strict=True)
        return num_tokens * float(np.interp(num_tokens, lengths, rates))


# Estimate of an ingestion's KV on disk, from the size of its text and a sample of it. Nothing is encoded.


# Of other kinds the text is compressed, or pictures lie beside it: the size of the file says nothing.
MEASURED = {*OWN, ".csv", ".json", ".eml", ".rtf"}
SAMPLES, SAMPLE_BYTES = 16, 4096


class KVEstimate(NamedTuple):
    """text_bytes, tokens: of the inputs whose text can be measured; markup counts as text
    num_bytes: of KV that they need on disk, were none of it there yet
    unknown:   files whose size says nothing about their text (PDF, office documents)
    model:     that reads them
    """

    text_bytes: int
    tokens: int
    num_bytes: int
    unknown: int
    model: str

    def __str__(self) -> str:
        rest = f", and that of {self.unknown} PDF files and the like" if self.unknown else ""
        toy = ", a toy that knows examples/corpus alone; for other text name another (--model, model=)"
        return (
            f"reading for the model {self.model}{toy if self.model in BUNDLED else ''}\n"
            f"{bytes_text(self.text_bytes)} of text, about {self.tokens:,} tokens: their KV takes about "
            f"{bytes_text(self.num_bytes)} on disk{rest} once it is computed, less what is stored already"
        )


def estimate_kv(
    inputs: Iterable[Input], lm: LanguageModel, codec: str, block_tokens: int, kept: float = 1.0
) -> KVEstimate:
    """block_tokens: of a chunk at most; kept: as `Recipe.share`"""
    given = list(inputs)
    files = [one.path for one in given if isinstance(one, SourceFile)]
    files += [file.path for file in find_files(one for one in given if isinstance(one, str | os.PathLike)).files]
    known: list[Path | Document] = [one for one in given if isinstance(one, Document)]
    known += [path for path in files if path.suffix.lower() in MEASURED]
    sizes = [_size(one) for one in known]
    rate = _tokens_per_byte(known, lm.tokenizer)
    tokens, coder, itemsize = round(rate * sum(sizes)), get_codec(codec), lm.dtype.itemsize
    block_bytes = coder.expected_bytes(lm.shape.layers, block_tokens, itemsize, kept)
    block_bytes += coder.expected_state_bytes(lm.shape.states, itemsize)
    num_bytes = round(tokens * (block_bytes / block_tokens))
    unknown = sum(path.suffix.lower() not in MEASURED for path in files)
    return KVEstimate(sum(sizes), tokens, num_bytes, unknown, lm.name)


def _tokens_per_byte(known: Sequence[Path | Document], tokenizer: PreTrainedTokenizerBase) -> float:
    """Estimate from the beginnings of some of the inputs, spread over all of them."""
    heads = [_head(one) for one in known[:: max(1, len(known) // SAMPLES)]]
    texts = [head.decode("utf-8", "ignore") for head in heads]
    sampled = sum(len(text.encode("utf-8", "ignore")) for text in texts)
    return sum(len(encode_text(tokenizer, text)) for text in texts) / sampled if sampled else 0.0


def _size(one: Path | Document) -> int:
    if isinstance(one, Document):
        return len(one.text.encode("utf-8", "ignore"))
    try:
        return one.stat().st_size
    except OSError:
        return 0  # the ingestion says what is wrong with it


def _head(one: Path | Document) -> bytes:
    if isinstance(one, Document):
        return one.text[:SAMPLE_BYTES].encode("utf-8", "ignore")
    try:
        with open(one, "rb") as file:
            return file.read(SAMPLE_BYTES)
    except OSError:
        return b""
