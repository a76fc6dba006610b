"""Shapes of KV: everything that a layer of a model keeps of the tokens that it has read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ragcache.errors import UnsupportedModelError
from ragcache.runtime import torch

if TYPE_CHECKING:
    from torch import Tensor


class LayerKind(Enum):
    """Kinds of layers by what they keep. A kind that is built has a shape type for `CacheShape.layers`.

    KV:     keys and values, by head or as one latent for all heads: `LayerShape`
    STATE:  a state that each token changes (recurrent layers), or keys that a pattern of its own picks; not built
    """

    KV = "keep keys and values"
    STATE = "keep a state or a pattern that cannot be moved"


ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers, as configurations call them, that keep keys and values."""


def refuse_unbuilt(model: str, kinds: Mapping[str, LayerKind]) -> None:
    """Raises UnsupportedModelError naming the layers that keep what no cache here holds.

    model: how the error calls it
    kinds: of all its layers, by the name of the layer's type
    """
    unbuilt = {kind: sorted(name for name, own in kinds.items() if own is kind) for kind in LayerKind}
    del unbuilt[LayerKind.KV]
    reasons = [f"layers of type {', '.join(names)} {kind.value}" for kind, names in unbuilt.items() if names]
    if reasons:
        raise UnsupportedModelError(f"{model} is not supported: {'; '.join(reasons)}")


class LayerShape(NamedTuple):
    """Keys and values of one token in one layer: [num_kv_heads, key_dim] and [num_kv_heads, value_dim].

    Of a latent layer (multi-head latent attention) they are the rotary key and the latent that all heads share. The key
    moves as any does, the latent stays as it is; the heads' keys and values are made of both where they are read.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers that a token takes."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class CacheShape:
    """The shape of a model's cache, layer by layer. latent: layers that keep a latent"""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    latent: frozenset[int] = frozenset()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def in_order(self, layer: int, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What a model hands to its cache as keys and values, or those in the model's order: it puts latents first."""
        return (pair[1], pair[0]) if layer in self.latent else pair

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(layer.numbers for layer in self.layers) * self.dtype.itemsize
