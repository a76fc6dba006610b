"""A block to try codecs on before there are any passages."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache.kv.block import KVBlock, empty_block
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.lazy_torch import torch


def example_block(layers: Sequence[LayerShape], num_tokens: int, dtype: torch.dtype) -> KVBlock:
    """Return a block of normally distributed numbers on the CPU, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    shape = CacheShape(tuple(layers), dtype, torch.device("cpu"))
    # Drawn in float32: some dtypes have no random generator, and all dtypes should get the same numbers.
    return empty_block(shape, num_tokens).map(lambda held: torch.randn(held.shape, generator=generator).to(dtype))
