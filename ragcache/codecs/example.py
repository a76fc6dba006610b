"""A block to try codecs on, before there are passages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ragcache.kv.block import KVBlock, empty_block
from ragcache.kv.shape import CacheShape, LayerShape
from ragcache.kv.sparse import keep


def example_block(layers: Sequence[LayerShape], num_tokens: int, dtype: torch.dtype, kept: float = 1.0) -> KVBlock:
    """A block of normally distributed numbers, always the same ones. kept: share of its tokens that each head holds"""
    generator = torch.Generator().manual_seed(0)
    shape = CacheShape(tuple(layers), dtype, torch.device("cpu"))
    # Drawn in float32: some dtypes have no generator of their own, and all are to hold the same numbers.
    block = empty_block(shape, num_tokens).map(lambda held: torch.randn(held.shape, generator=generator).to(dtype))
    if (count := math.ceil(kept * num_tokens)) == num_tokens:
        return block
    held = torch.arange(num_tokens) < count
    return keep(block, [held.expand(layer.num_kv_heads, -1) for layer in layers])
