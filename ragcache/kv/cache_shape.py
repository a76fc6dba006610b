"""Shapes of KV: everything that a layer of a model keeps of the tokens that it has read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from ragcache.errors import UnsupportedModelError
from ragcache.lazy_torch import Tensor, torch


class LayerKind(Enum):
    """Kinds of layers by the data that they keep of the tokens that they have read.

    KV:    keys and values, by head or as a latent for all heads; their shape is a `LayerShape`
    STATE: a state that each token changes; its shape is a `StateShape`
    OTHER: data of any other kind, such as keys selected by a pattern of the layer; not supported
    NONE:  nothing: the layer processes each token by itself
    """

    KV = "keep keys and values"
    STATE = "keep a state, and no layer keeps keys and values"
    OTHER = "keep a state or a pattern that cannot be moved"
    NONE = "keep nothing"


ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers, as named in configurations, that keep keys and values."""
STATE_LAYERS = {"linear_attention", "conv", "hybrid"}
"""Types of layers that keep a state; "hybrid" layers keep keys and values too."""


def keeps_state(name: str) -> bool:
    return name in STATE_LAYERS


def layer_kind(name: str) -> LayerKind:
    """Return the kind of a layer type; OTHER for a type that is not known here."""
    if keeps_state(name):
        return LayerKind.STATE
    return LayerKind.KV if name in ATTENTION_LAYERS else LayerKind.NONE if name in ("mlp", "moe") else LayerKind.OTHER


def keeps_kv(name: str) -> bool:
    """Return whether a layer of this type keeps keys and values, or would if it were supported."""
    return name == "hybrid" or layer_kind(name) not in (LayerKind.STATE, LayerKind.NONE)


def refuse_unbuilt(model: str, kinds: Mapping[str, LayerKind]) -> None:
    """Raise UnsupportedModelError, naming the layer types, if no cache here can hold the data of some layers.

    Layers with a state are refused only in a model that has no layer with keys and values.

    model: the model's name in the error
    kinds: the kind of every layer type of the model, by name
    """
    unbuilt = {kind: sorted(name for name, own in kinds.items() if own is kind) for kind in LayerKind}
    del unbuilt[LayerKind.KV], unbuilt[LayerKind.NONE]
    if LayerKind.KV in kinds.values() or "hybrid" in kinds:
        del unbuilt[LayerKind.STATE]
    reasons = [f"layers of type {', '.join(names)} {kind.value}" for kind, names in unbuilt.items() if names]
    if reasons:
        raise UnsupportedModelError(f"{model} is not supported: {'; '.join(reasons)}")


class LayerShape(NamedTuple):
    """Keys and values of a token in one layer: [num_kv_heads, key_dim] and [num_kv_heads, value_dim].

    In a latent layer (multi-head latent attention) they are the rotary key and the latent that all heads share. The key
    is rotated like any other, and the latent stays unchanged; the heads' keys and values are computed from both when
    they are read.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Return how many numbers a token takes."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class StateShape(NamedTuple):
    """The state of a recurrent layer.

    conv:      channels and width of its short convolution's window
    state:     [num_heads, rows, columns]; None if the layer is only the convolution (LFM2)
    is_matrix: whether a chunk mixes a head's rows by a matrix (gated delta rule) or multiplies them by one number
               (Mamba-2)
    """

    conv: tuple[int, int]
    state: tuple[int, int, int] | None = None
    is_matrix: bool = False

    def held_bytes(self, itemsize: int) -> int:
        """Return the bytes of the convolution's window, in the model's dtype, and of the state, in float32.

        itemsize: bytes of a number of the model
        """
        return math.prod(self.conv) * itemsize + (4 * math.prod(self.state) if self.state else 0)

    def map_bytes(self, itemsize: int, *, rounded: bool = False) -> int:
        """Return the most bytes that a block's `StateMap` takes for the layer.

        itemsize: bytes of a number of the model
        rounded:  whether the map is in int8 with a float32 scale for each row; otherwise it is in float32
        """
        heads, rows, columns = self.state or (0, 0, 0)
        p, q = (1 if rounded else 4), (columns + 4 if rounded else 4 * columns)
        per_row = (p * rows + (4 if rounded else 0) if self.is_matrix else 0) + q
        return math.prod(self.conv) * itemsize + heads * (rows * per_row + (0 if self.is_matrix else 4))


@dataclass(frozen=True)
class CacheShape:
    """The shape of a model's cache, layer by layer.

    layers:  layers that keep keys and values
    latent:  indices of the layers among them that keep a latent
    states:  recurrent layers
    numbers: the model's own numbers of `layers`; empty if `layers` are all layers of the model
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
        """Swap a latent layer's keys and values: the model passes the latent to its cache first.

        The same call restores the model's order.
        """
        return (pair[1], pair[0]) if layer in self.latent else pair

    @cached_property
    def token_bytes(self) -> int:
        """Return the bytes of a token's keys and values in all layers."""
        return sum(layer.numbers for layer in self.layers) * self.dtype.itemsize

    @cached_property
    def state_bytes(self) -> int:
        """Return the bytes of all recurrent layers' states, which do not depend on the number of tokens."""
        return sum(state.held_bytes(self.dtype.itemsize) for state in self.states)

    @cached_property
    def map_bytes(self) -> int:
        """Return the bytes of all recurrent layers' maps in a block, not rounded.

        They do not depend on the block's length, unless it is shorter than a convolution's window: then they are fewer.
        """
        return sum(state.map_bytes(self.dtype.itemsize) for state in self.states)

    def rank(self, number: int) -> int:
        """Return the index in `layers` of the layer with this number in the model."""
        return self.numbers.index(number) if self.numbers else number
