"""KV of a prompt's first tokens, as a plain pass over them leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ragcache.kv.block import KVBlock
from ragcache.kv.rope import Rope


class Exact(Protocol):
    """The KV that earlier passes left of the prompt's first `num_tokens` tokens, keys rotated to 0, 1, ..."""

    @property
    def num_tokens(self) -> int: ...

    def copy_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's to [num_kv_heads, num_tokens, head_dim] each."""


@dataclass(frozen=True, eq=False)
class ExactBlock:
    """The isolated block of these tokens, rotated as it is copied."""

    block: KVBlock
    rope: Rope

    @property
    def num_tokens(self) -> int:
        return self.block.num_tokens

    def copy_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.rope.rotate(self.block.layer_keys(layer).to(keys.device, keys.dtype), layer, 0, out=keys)
        self.block.copy_values(layer, values)
