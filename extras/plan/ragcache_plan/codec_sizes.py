"""Size of a model's KV under each codec."""

from __future__ import annotations

from typing import NamedTuple

from ragcache.codecs import CODECS, get_codec
from ragcache_plan.shape import KVShape


class CodecSize(NamedTuple):
    """bytes_per_token: of a block of the given length, in its tier; ratio: to the raw numbers; lossless: bit for bit"""

    name: str
    bytes_per_token: float
    ratio: float
    lossless: bool


def codec_sizes(shape: KVShape, chunk_tokens: int, kept: float = 1.0) -> list[CodecSize]:
    """Every registered codec over numbers of the model's shape, raw first; see `Codec.expected_bytes`.

    kept: share of its tokens that each head holds; see `Recipe`

    Right for codecs whose bytes do not depend on the content, and for one whose basis is fitted to so many bytes; one
    that finds structure does better on real blocks.
    """
    found = []
    for name in CODECS:
        codec = get_codec(name)
        num_bytes = codec.expected_bytes(shape.by_layer, chunk_tokens, shape.itemsize, kept) / chunk_tokens
        found.append(CodecSize(name, num_bytes, num_bytes / shape.bytes_per_token, codec.lossless))
    return sorted(found, key=lambda codec: codec.name != "raw")
