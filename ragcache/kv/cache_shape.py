"""Shapes of KV: everything that a layer of a model keeps of the tokens that it has read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ragcache.errors import UnsupportedModelError
from ragcache.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class LayerKind(Enum):
    """Kinds of layers by what they keep. A kind that is built has a shape type for `CacheShape.layers`.

    KV:     keys and values, by head or as one latent for all heads: `LayerShape`
    STATE:  a state that each token changes: `StateShape`
    OTHER:  keys that a pattern of its own picks; not built
    NONE:   nothing: the layer sees each token by itself
    """

    KV = "keep keys and values"
    STATE = "keep a state, and no layer keeps keys and values"
    OTHER = "keep a state or a pattern that cannot be moved"
    NONE = "keep nothing"


ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers, as configurations call them, that keep keys and values."""
STATE_LAYERS = {"linear_attention", "conv", "hybrid"}
"""Those that keep a state; "hybrid" ones keep keys and values beside it."""


def keeps_state(name: str) -> bool:
    return name in STATE_LAYERS


def layer_kind(name: str) -> LayerKind:
    """What a layer of this type keeps."""
    if keeps_state(name):
        return LayerKind.STATE
    return LayerKind.KV if name in ATTENTION_LAYERS else LayerKind.NONE if name in ("mlp", "moe") else LayerKind.OTHER


def keeps_kv(name: str) -> bool:
    """Whether a layer of this type keeps keys and values, or is to."""
    return name == "hybrid" or layer_kind(name) not in (LayerKind.STATE, LayerKind.NONE)


def refuse_unbuilt(model: str, kinds: Mapping[str, LayerKind]) -> None:
    """Raises UnsupportedModelError naming the layers that keep what no cache here holds.

    model: how the error calls it
    kinds: of all its layers, by the name of the layer's type
    """
    unbuilt = {kind: sorted(name for name, own in kinds.items() if own is kind) for kind in LayerKind}
    del unbuilt[LayerKind.KV], unbuilt[LayerKind.NONE]
    if LayerKind.KV in kinds.values() or "hybrid" in kinds:
        del unbuilt[LayerKind.STATE]
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


class StateShape(NamedTuple):
    """State of one recurrent layer.

    conv:      channels and width of its short convolution's window
    state:     [num_heads, rows, columns]; None where the convolution is all (LFM2)
    is_matrix: a chunk mixes a head's rows by a matrix (gated delta rule); else it multiplies by one number (Mamba-2)
    """

    conv: tuple[int, int]
    state: tuple[int, int, int] | None = None
    is_matrix: bool = False

    def held_bytes(self, itemsize: int) -> int:
        """Bytes of the state itself. itemsize: bytes of a number of the model; a state is in float32"""
        return math.prod(self.conv) * itemsize + (4 * math.prod(self.state) if self.state else 0)

    def map_bytes(self, itemsize: int, *, rounded: bool = False) -> int:
        """Bytes of what a block keeps of it (`StateMap`), at most. rounded: in int8, with a scale a row"""
        heads, rows, columns = self.state or (0, 0, 0)
        p, q = (1 if rounded else 4), (columns + 4 if rounded else 4 * columns)
        per_row = (p * rows + (4 if rounded else 0) if self.is_matrix else 0) + q
        return math.prod(self.conv) * itemsize + heads * (rows * per_row + (0 if self.is_matrix else 4))


@dataclass(frozen=True)
class CacheShape:
    """The shape of a model's cache, layer by layer.

    layers:  those that keep keys and values
    latent:  of these, layers that keep a latent
    states:  recurrent layers
    numbers: the model's own numbers of `layers`; empty where these are all of its layers
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    latent: frozenset[int] = frozenset()
    states: tuple[StateShape, ...] = ()
    numbers: tuple[int, ...] = ()

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

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all recurrent layers' states, however many tokens they have read."""
        return sum(state.held_bytes(self.dtype.itemsize) for state in self.states)

    @cached_property
    def map_bytes(self) -> int:
        """Bytes of what a block keeps of recurrent layers, however many tokens it has (fewer for the shortest ones)."""
        return sum(state.map_bytes(self.dtype.itemsize) for state in self.states)

    def rank(self, number: int) -> int:
        """The place in `layers` of the layer that the model calls by this number."""
        return self.numbers.index(number) if self.numbers else number
