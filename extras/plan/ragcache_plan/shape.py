"""The shape of a model's KV, and its size under each codec."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from ragcache.codecs import CODECS, get_codec
from ragcache.errors import ConfigError, check_least
from ragcache.kv.cache_shape import LayerShape, StateShape

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVShape:
    """Keys and values of a token: [num_layers, num_kv_heads, head_dim] each. Raises ConfigError naming the field.

    layers: each layer's shape, if the model's layers differ; heads and width are then the first layer's
    states: of its recurrent layers, which keep no keys and values and are not among `num_layers`
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    layers: tuple[LayerShape, ...] = ()
    states: tuple[StateShape, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("layers", self.num_layers), ("kv-heads", self.num_kv_heads), ("head-dim", self.head_dim)):
            check_least(f"--{name}", value, 1)
        if self.dtype not in ITEMSIZES:
            raise ConfigError(f"--dtype {self.dtype!r} is unknown; choose one of auto, {', '.join(ITEMSIZES)}")

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token's keys and values in all layers."""
        return sum(layer.numbers for layer in self.by_layer) * self.itemsize

    @property
    def state_bytes(self) -> int:
        """Return the bytes that a block keeps of recurrent layers, regardless of its number of tokens."""
        return sum(state.map_bytes(self.itemsize) for state in self.states)

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number."""
        return ITEMSIZES[self.dtype]

    @property
    def by_layer(self) -> tuple[LayerShape, ...]:
        return self.layers or (LayerShape(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    def __str__(self) -> str:
        counts = Counter((layer.num_kv_heads, layer.key_dim) for layer in self.by_layer)
        alike = [f"{count} layers, {heads} KV heads of {width}" for (heads, width), count in counts.items()]
        if self.states:
            alike.append(f"{len(self.states)} recurrent layers, {self.state_bytes / 1e6:,.1f} MB a chunk")
        return f"{'; '.join(alike)}; {self.dtype}" if len(alike) > 1 else f"{alike[0]}, {self.dtype}"


class CodecSize(NamedTuple):
    """The size of blocks under a codec.

    bytes_per_token: of a block of the given length, as it is stored
    ratio:           of its bytes to those of the raw numbers
    lossless:        whether blocks are restored bit for bit
    """

    name: str
    bytes_per_token: float
    ratio: float
    lossless: bool


def codec_sizes(shape: KVShape, chunk_tokens: int, kept: float = 1.0) -> list[CodecSize]:
    """Return the size of a chunk under each registered codec, raw first; see `Codec.expected_bytes`.

    kept: share of its tokens that each head holds; see `Recipe`

    Right for codecs whose bytes do not depend on the content, and for codecs whose basis is fitted to these bytes; a
    codec that finds structure does better on real blocks.
    """
    found, raw = [], shape.bytes_per_token + shape.state_bytes / chunk_tokens
    for name in CODECS:
        codec = get_codec(name)
        states = codec.expected_state_bytes(shape.states, shape.itemsize)
        kv = codec.expected_bytes(shape.by_layer, chunk_tokens, shape.itemsize, kept)
        num_bytes = (kv + states) / chunk_tokens
        found.append(CodecSize(name, num_bytes, num_bytes / raw, codec.lossless))
    return sorted(found, key=lambda codec: codec.name != "raw")
