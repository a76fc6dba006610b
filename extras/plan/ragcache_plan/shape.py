"""The shape of a model's KV, without its weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ragcache.codecs import CODECS, get_codec
from ragcache.errors import ConfigError, check_least
from ragcache.kv.cache_shape import ATTENTION_LAYERS, LayerShape, StateShape
from ragcache.models.hub import ADAPTER, CONFIG, resolve

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Families whose config.json says what the model does, field by field; of all others, and of a field that is absent,
# only transformers knows what is meant.
PLAIN = {"llama", "mistral", "qwen2", "qwen3"}
WIDTH_OF_HIDDEN = PLAIN - {"qwen3"}  # without head_dim, heads share hidden_size
PLAIN_ROPE = {"default", "linear", "llama3", "yarn"}
# What makes such a model another one, or one that is refused; see `models/support.py`.
OBSTACLES = ("text_config", "is_encoder_decoder", "kv_lora_rank", "alibi", "position_embedding_type")


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one token: [num_layers, num_kv_heads, head_dim] each. Raises ConfigError naming the field.

    layers: of a model whose layers differ, each; heads and width are then the first one's
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
        """2 (keys and values) * num_layers * num_kv_heads * head_dim * bytes of a number, where layers are alike."""
        return sum(layer.numbers for layer in self.by_layer) * self.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes that a block keeps of recurrent layers, however many tokens it has."""
        return sum(state.map_bytes(self.itemsize) for state in self.states)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
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


def shape_of(model: str | Path, dtype: str = "auto") -> KVShape:
    """The shape that a model's config.json states; the weights need not be there.

    model: bundled name, directory with a config.json, or hub id
    dtype: "auto" is the configuration's own, float32 where it names none

    Raises ModelNotFoundError, UnsupportedModelError, ConfigError.
    """
    found = plain_shape(Path(resolve(model)))
    if found is None:
        from ragcache_plan.configured import configured_shape

        found = configured_shape(model)
    return found if dtype == "auto" else replace(found, dtype=dtype)


def plain_shape(directory: Path) -> KVShape | None:
    """The shape that the config.json there states field by field; None where that takes transformers, which takes
    seconds: another family, an absent field, rotary scaling or layers of another kind, a damaged file, an adapter."""
    if (directory / ADAPTER).is_file():
        return None
    try:
        return _stated_shape(json.loads((directory / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # whatever is wrong with it, transformers says what
        return None


def _stated_shape(stated: object) -> KVShape | None:
    """Raises TypeError where a name is a list or the like."""
    if not isinstance(stated, dict) or stated.get("model_type") not in PLAIN or not _is_plain(stated):
        return None
    numbers = [stated.get("num_hidden_layers"), stated.get("num_key_value_heads"), stated.get("head_dim")]
    if numbers[2] is None and stated["model_type"] in WIDTH_OF_HIDDEN:
        numbers[2] = _width_of_hidden(stated)
    layers, heads, width = (number if type(number) is int else 0 for number in numbers)
    dtype = stated.get("dtype") or stated.get("torch_dtype") or "float32"
    if min(layers, heads, width) < 1 or dtype not in ITEMSIZES:
        return None
    return KVShape(layers, heads, width, dtype)


def _is_plain(stated: dict[str, Any]) -> bool:
    kinds = set(stated.get("layer_types") or ())
    if any(map(stated.get, OBSTACLES)) or len(kinds) > 1 or not kinds <= ATTENTION_LAYERS:
        return False
    return all(_plainly_rotates(stated.get(field) or {}) for field in ("rope_parameters", "rope_scaling"))


def _plainly_rotates(rope: object) -> bool:
    """rope: of transformers 5, or by the field and the names of older ones"""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return False
    return "llama_4_scaling_beta" not in rope and rope.get("rope_type", rope.get("type", "default")) in PLAIN_ROPE


def _width_of_hidden(stated: dict[str, Any]) -> int | None:
    hidden, heads = stated.get("hidden_size"), stated.get("num_attention_heads")
    return hidden // heads if type(hidden) is type(heads) is int and heads else None


# Size of a model's KV under each codec.


class CodecSize(NamedTuple):
    """bytes_per_token: of a block of the given length, in its tier; ratio: to the raw numbers; lossless: bit for bit"""

    name: str
    bytes_per_token: float
    ratio: float
    lossless: bool


def codec_sizes(shape: KVShape, chunk_tokens: int, kept: float = 1.0) -> list[CodecSize]:
    """Every registered codec over numbers of the model's shape, raw first; see `Codec.expected_bytes`.

    kept: share of its tokens that each head holds; see `Recipe`

    Right for codecs whose bytes do not depend on the content, and for one whose basis is fitted to so many bytes; one
    that finds structure does better on real blocks.
    """
    found, raw = [], shape.bytes_per_token + shape.state_bytes / chunk_tokens
    for name in CODECS:
        codec = get_codec(name)
        states = codec.expected_state_bytes(shape.states, shape.itemsize)
        kv = codec.expected_bytes(shape.by_layer, chunk_tokens, shape.itemsize, kept)
        num_bytes = (kv + states) / chunk_tokens
        found.append(CodecSize(name, num_bytes, num_bytes / raw, codec.lossless))
    return sorted(found, key=lambda codec: codec.name != "raw")
