"""The shape of a model's KV, without its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ragcache.codecs.sizes import example_block
from ragcache.errors import ConfigError, ModelNotFoundError, check_least, first_line
from ragcache.kv.block import KVBlock
from ragcache.kv.shape import LayerShape
from ragcache.models.hub import split_file
from ragcache.models.loading import DTYPES, base_of
from ragcache.models.support import refuse_by_config


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one token: [num_layers, num_kv_heads, head_dim] each. Raises ConfigError naming the field.

    layers: of a model whose layers differ, each; heads and width are then the first one's
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    layers: tuple[LayerShape, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("layers", self.num_layers), ("kv-heads", self.num_kv_heads), ("head-dim", self.head_dim)):
            check_least(f"--{name}", value, 1)
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is unknown; choose one of auto, {', '.join(DTYPES)}")

    @property
    def bytes_per_token(self) -> int:
        """2 (keys and values) * num_layers * num_kv_heads * head_dim * bytes of a number, where layers are alike."""
        return sum(layer.numbers for layer in self._by_layer()) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        counts = Counter((layer.num_kv_heads, layer.key_dim) for layer in self._by_layer())
        alike = [f"{count} layers, {heads} KV heads of {width}" for (heads, width), count in counts.items()]
        return f"{'; '.join(alike)}; {self.dtype}" if len(alike) > 1 else f"{alike[0]}, {self.dtype}"

    def block(self, num_tokens: int) -> KVBlock:
        """A block of this shape; see `example_block`."""
        return example_block(self._by_layer(), num_tokens, DTYPES[self.dtype])

    def _by_layer(self) -> tuple[LayerShape, ...]:
        return self.layers or (LayerShape(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers


def shape_of(model: str | Path, dtype: str = "auto") -> KVShape:
    """The shape that a model's config.json states; the weights need not be there.

    model: bundled name, directory with a config.json, or hub id
    dtype: "auto" is the configuration's own, float32 where it names none

    Raises ModelNotFoundError, UnsupportedModelError, ConfigError.
    """
    where, file = split_file(base_of(model))
    if not file and Path(where).exists() and not (Path(where) / "config.json").is_file():
        raise ModelNotFoundError(f"--model {model}: there is no config.json in it")
    try:
        config = AutoConfig.from_pretrained(where, **file)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"--model {model}: no configuration can be read ({first_line(error)})") from error
    refuse_by_config(config, str(model))
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = own if dtype == "auto" else dtype
    if layers := _layers_that_differ(config):
        return KVShape(len(layers), layers[0].num_kv_heads, layers[0].key_dim, dtype, layers)
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    num_layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
    if not num_layers or not kv_heads or not head_dim:
        raise ConfigError(f"--model {model}: its config.json does not state its shape; give --layers, --kv-heads, ...")
    return KVShape(int(num_layers), int(kv_heads), int(head_dim), dtype)


def _layers_that_differ(config: PreTrainedConfig) -> tuple[LayerShape, ...]:
    """Shapes of the layers, by the projections of a model without weights; none where all are alike.

    No field of a configuration says it in every family. Layers of one type are alike: most models need not be built.
    """
    if len(set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())) < 2:
        return ()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes: dict[int, LayerShape] = {}
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj") and hasattr(module, "head_dim"):
            made: Any = module
            heads = made.k_proj.out_features // made.head_dim
            values = made.v_proj or made.k_proj  # Gemma 4 may make both from one projection
            shapes[made.layer_idx] = LayerShape(heads, made.head_dim, values.out_features // heads)
    layers = tuple(shape for _, shape in sorted(shapes.items()))
    return layers if len(set(layers)) > 1 else ()
