"""The shape of a model's KV by transformers' configuration classes, for values that a config.json leaves to them.

A separate module: transformers takes seconds to import, and most models do not need it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from ragcache.errors import ConfigError, ModelNotFoundError, first_line
from ragcache.kv.cache_shape import LayerShape, StateShape, keeps_state
from ragcache.models.checkpoint import auto_class, refuse_own_code
from ragcache.models.hub import split_file
from ragcache.models.load import base_of
from ragcache.models.named import CONFIG
from ragcache.models.recurrence import Mixer, hook_mixers
from ragcache.models.support import refuse_by_config
from ragcache_plan.shape import KVShape


def configured_shape(model: str | Path) -> KVShape:
    """Return the shape as `shape_of` does, for every model and in the configuration's own dtype."""
    where, file = split_file(base_of(model))
    if not file and Path(where).exists() and not (Path(where) / CONFIG).is_file():
        raise ModelNotFoundError(f"--model {model}: there is no config.json in it")
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False, **file)
    except (OSError, ValueError, KeyError) as error:
        refuse_own_code(where, str(model), error)
        raise ModelNotFoundError(f"--model {model}: no configuration can be read ({first_line(error)})") from error
    refuse_by_config(config, str(model))
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    layers, states = _layers_that_differ(config)
    if layers:
        return KVShape(len(layers), layers[0].num_kv_heads, layers[0].key_dim, dtype, layers, states)
    config = config.get_text_config(decoder=True)
    rank, rotary = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if rank and rotary:  # multi-head latent attention
        layers = (LayerShape(1, int(rotary), int(rank)),) * int(config.num_hidden_layers)
        return KVShape(len(layers), 1, layers[0].key_dim, dtype, layers)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    num_layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
    if not num_layers or not kv_heads or not head_dim:
        raise ConfigError(f"--model {model}: its config.json does not state its shape; give --layers, --kv-heads, ...")
    return KVShape(int(num_layers), int(kv_heads), int(head_dim), dtype)


def _layers_that_differ(config: PreTrainedConfig) -> tuple[tuple[LayerShape, ...], tuple[StateShape, ...]]:
    """Return the shapes of the layers, and of recurrent layers' states; none if all layers are alike.

    They are read from the projections of a model without weights, because no field of the configuration states them in
    every family. Layers of the same type are alike, so most models need not be built.
    """
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if len(kinds) < 2 and not any(map(keeps_state, kinds)):
        return (), ()
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    shapes: dict[int, LayerShape] = {}
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj") and hasattr(module, "head_dim"):
            made: Any = module
            heads = made.k_proj.out_features // made.head_dim
            values = made.v_proj or made.k_proj  # Gemma 4 may make both from the same projection
            shapes[made.layer_idx] = LayerShape(heads, made.head_dim, values.out_features // heads)
    layers = tuple(shape for _, shape in sorted(shapes.items()))
    states = tuple(_state(mixer, config) for mixer in hook_mixers(model))
    return (layers, states) if len(set(layers)) > 1 or states else ((), ())


def _state(mixer: Mixer, config: PreTrainedConfig) -> StateShape:
    """Return the shape of the mixer's state after two meta tokens.

    Only a mixer of the gated delta rule is assumed to have `head_k_dim`.
    """
    width = int(config.get_text_config(decoder=True).hidden_size)
    with torch.no_grad():
        _, (conv, state) = mixer.step(torch.empty(1, 2, width, device="meta"), None, {})
    window = (conv.shape[1], conv.shape[2])
    if state is None:
        return StateShape(window)
    return StateShape(window, (state.shape[1], state.shape[2], state.shape[3]), hasattr(mixer.module, "head_k_dim"))
