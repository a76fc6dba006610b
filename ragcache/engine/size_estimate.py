"""Estimates an ingestion's KV on disk, from the size of its text and a sample of it.

Nothing is encoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ragcache.codecs import get_codec
from ragcache.ingest.document import Document
from ragcache.ingest.ingest_run import Input
from ragcache.ingest.readers import OWN, SourceFile, find_files
from ragcache.ingest.report import bytes_text
from ragcache.models.block_model import BlockModel
from ragcache.models.hub import BUNDLED
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import encode_text

# Files of other kinds compress their text or contain pictures, so their size says nothing about it.
MEASURED = {*OWN, ".csv", ".json", ".eml", ".rtf"}
SAMPLES, SAMPLE_BYTES = 16, 4096


class KVEstimate(NamedTuple):
    """Estimated size of an ingestion's KV.

    text_bytes, tokens: of the inputs whose text can be measured; markup counts as text
    num_bytes: of their KV on disk, if none of it is stored yet
    unknown:   files whose size says nothing about their text (PDF, office documents)
    model:     name of the model that reads them
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
    inputs: Iterable[Input], lm: BlockModel, codec: str, block_tokens: int, kept: float = 1.0
) -> KVEstimate:
    """Estimate the KV of these inputs. block_tokens: most tokens of a chunk; kept: see `Recipe.kept`"""
    items = list(inputs)
    files = [item.path for item in items if isinstance(item, SourceFile)]
    files += [file.path for file in find_files(item for item in items if isinstance(item, str | os.PathLike)).files]
    known: list[Path | Document] = [item for item in items if isinstance(item, Document)]
    known += [path for path in files if path.suffix.lower() in MEASURED]
    sizes = [_size(item) for item in known]
    rate = _tokens_per_byte(known, lm.tokenizer)
    tokens = round(rate * sum(sizes))
    num_bytes = round(tokens * bytes_per_token(lm, codec, block_tokens, kept))
    unknown = sum(path.suffix.lower() not in MEASURED for path in files)
    return KVEstimate(sum(sizes), tokens, num_bytes, unknown, lm.name)


def bytes_per_token(lm: BlockModel, codec: str, block_tokens: int, kept: float = 1.0) -> float:
    """Estimate the bytes that a token's KV takes on disk. The arguments are those of `estimate_kv`."""
    if not isinstance(lm, LanguageModel):  # another engine's states are stored unchanged
        return float(lm.kv_bytes_per_token)
    coder, itemsize = get_codec(codec), lm.dtype.itemsize
    block_bytes = coder.expected_bytes(lm.shape.layers, block_tokens, itemsize, kept)
    return (block_bytes + coder.expected_state_bytes(lm.shape.states, itemsize)) / block_tokens


def _tokens_per_byte(known: Sequence[Path | Document], tokenizer: PreTrainedTokenizerBase) -> float:
    """Estimate the tokens per byte of text from the beginnings of some inputs, which are spread evenly."""
    heads = [_head(item) for item in known[:: max(1, len(known) // SAMPLES)]]
    texts = [head.decode("utf-8", "ignore") for head in heads]
    sampled = sum(len(text.encode("utf-8", "ignore")) for text in texts)
    return sum(len(encode_text(tokenizer, text)) for text in texts) / sampled if sampled else 0.0


def _size(item: Path | Document) -> int:
    if isinstance(item, Document):
        return len(item.text.encode("utf-8", "ignore"))
    try:
        return item.stat().st_size
    except OSError:
        return 0  # the ingestion reports the error


def _head(item: Path | Document) -> bytes:
    if isinstance(item, Document):
        return item.text[:SAMPLE_BYTES].encode("utf-8", "ignore")
    try:
        with open(item, "rb") as file:
            return file.read(SAMPLE_BYTES)
    except OSError:
        return b""
