"""One chunk's keys and values, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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

    Who needs one layer at a time asks for it by `layer_keys` and `copy_keys` (and the same of values): a block whose
    numbers are not at hand as they are, such as an encoded one, then makes that layer alone.
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
    def key_shape(self) -> torch.Size:
        return self.keys.shape

    @property
    def value_shape(self) -> torch.Size:
        return self.values.shape

    @property
    def num_layers(self) -> int:
        return self.key_shape[0]

    @property
    def num_tokens(self) -> int:
        return self.key_shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes that the block takes where it is held."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def layer_keys(self, layer: int) -> Tensor:
        """One layer's keys, [num_kv_heads, num_tokens, head_dim]; not to be written to."""
        return self.keys[layer]

    def layer_values(self, layer: int) -> Tensor:
        return self.values[layer]

    def copy_keys(self, layer: int, out: Tensor) -> None:
        """Write one layer's keys to `out`, [num_kv_heads, num_tokens, head_dim], of any device and float dtype."""
        out.copy_(self.keys[layer], non_blocking=True)

    def copy_values(self, layer: int, out: Tensor) -> None:
        out.copy_(self.values[layer], non_blocking=True)

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        """The same block over other tensors of the same content: `change` copies or moves each that is held."""
        return replace(self, keys=change(self.keys), values=change(self.values))

    def equal(self, other: KVBlock) -> bool:
        """Bit for bit."""
        return torch.equal(self.keys, other.keys) and torch.equal(self.values, other.values)
