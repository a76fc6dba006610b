"""KV blocks with known content."""

from __future__ import annotations

import hashlib

import torch

from ragcache.kv.block import KVBlock

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def make_block(seed: int, *, num_tokens: int = 5, dtype: torch.dtype = torch.float32, layers: int = 2) -> KVBlock:
    """Random keys and values, [layers, 2 heads, num_tokens, 4]; the same seed gives the same block in every process."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, 2, num_tokens, 4)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return KVBlock(keys, values)
