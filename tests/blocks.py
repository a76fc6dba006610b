"""KV blocks with known content."""

from __future__ import annotations

import hashlib

import torch

from ragcache.kv.block import KVBlock, MixedBlock

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def make_block(seed: int, *, num_tokens: int = 5, dtype: torch.dtype = torch.float32, layers: int = 2) -> KVBlock:
    """Random keys and values, [layers, 2 heads, num_tokens, 4]; the same seed gives the same block in every process."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, 2, num_tokens, 4)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return KVBlock(keys, values)


# Layers 0, 2 and 4 are of the first part, [3 layers, 2 heads, n, 6 and 4]; 1 and 3 of the second, [2, 1, n, 10 and 10].
PART_OF = (0, 1, 0, 1, 0)


def make_mixed_block(seed: int, *, num_tokens: int = 5, dtype: torch.dtype = torch.float32) -> MixedBlock:
    """Random keys and values in layers that differ in heads and in widths."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    parts = [
        KVBlock(numbers(3, 2, num_tokens, 6), numbers(3, 2, num_tokens, 4)),
        KVBlock(numbers(2, 1, num_tokens, 10), numbers(2, 1, num_tokens, 10)),
    ]
    return MixedBlock(parts, PART_OF)
