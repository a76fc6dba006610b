"""One chunk's keys and values, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.errors import DamagedBlockError
from ragcache.kv.identity import Recipe


@dataclass(frozen=True, eq=False)
class KVBlock:
    """Keys before RoPE and values of one chunk.

    keys:   [num_layers, num_kv_heads, num_tokens, head_dim], final (after k_norm where there is one) but not rotated
    values: [num_layers, num_kv_heads, num_tokens, head_dim]
    recipe: how it was encoded, where that is known (a block that was stored is known by its key)

    Raises DamagedBlockError when the shapes do not agree.
    """

    keys: Tensor
    values: Tensor
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        if self.keys.ndim != 4 or self.keys.shape[:3] != self.values.shape[:3] or self.values.ndim != 4:
            raise DamagedBlockError(
                f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} are not one block's: both are "
                "[num_layers, num_kv_heads, num_tokens, head_dim]"
            )

    @property
    def num_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def equal(self, other: KVBlock) -> bool:
        """Bit for bit."""
        return torch.equal(self.keys, other.keys) and torch.equal(self.values, other.values)
