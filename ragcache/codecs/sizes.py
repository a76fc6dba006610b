"""Encoded size of a model's KV, found by encoding an example."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragcache.codecs.base import Codec
from ragcache.kv.block import KVBlock


def example_block(key_size: Sequence[int], value_size: Sequence[int], dtype: torch.dtype) -> KVBlock:
    """A block of normally distributed numbers, always the same ones; sizes as `KVBlock` has them."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(tuple(size), generator=generator).to(dtype) for size in (key_size, value_size))
    return KVBlock(keys, values)


def encoded_bytes_per_token(codec: Codec, example: KVBlock) -> float:
    """Right for codecs whose bytes do not depend on the content; others do better where real blocks have structure."""
    return sum(tensor.nbytes for tensor in codec.encode(example).values()) / example.num_tokens
