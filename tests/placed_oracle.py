"""What the placing kernel writes, by NumPy: keys turned to where they stand."""

import numpy as np
import torch

from ragcache.codecs import get_codec
from ragcache.kv.block import KVBlock
from ragcache.kv.rope import Angles

AT = 5
"""Where the first token stands."""


def random_block(layers: int, heads: int, tokens: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> KVBlock:
    generator = torch.Generator().manual_seed(tokens + layers)
    keys, values = (
        torch.randn(layers, heads, tokens, width, generator=generator).to(dtype) for width in (key_dim, value_dim)
    )
    return KVBlock(keys, values)


def coded(block: KVBlock, codec: str) -> KVBlock:
    return get_codec(codec).decode(get_codec(codec).encode(block))


def turned(keys: np.ndarray, start: int, half: int) -> np.ndarray:
    """Keys [heads, tokens, dim] at positions `start` on, pairs (d, d + half), in float64."""
    angle = np.arange(start, start + keys.shape[1])[:, None] * 0.01 ** (np.arange(half) / max(half, 1))
    first, second = keys[..., :half], keys[..., half : 2 * half]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, keys[..., 2 * half :]], -1)


def angles_at(start: int, count: int, half: int) -> Angles | None:
    if half == 0:
        return None
    angle = torch.arange(start, start + count)[:, None] * 0.01 ** (torch.arange(half).double() / half)
    return Angles(angle.cos().float(), angle.sin().float(), half)
