"""The shape of a model's KV as its config.json states it, without its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragcache.kv.cache_shape import ATTENTION_LAYERS
from ragcache.models.hub import ADAPTER, resolve
from ragcache.models.named import CONFIG
from ragcache_plan.shape import ITEMSIZES, KVShape

# Families whose config.json states the model's behaviour, field by field; for all others, and for an absent field,
# only transformers knows the meaning.
PLAIN = {"llama", "mistral", "qwen2", "qwen3"}
WIDTH_OF_HIDDEN = PLAIN - {"qwen3"}  # without head_dim, heads share hidden_size
PLAIN_ROPE = {"default", "linear", "llama3", "yarn"}
# Fields that make such a model another model, or an unsupported one; see `models/support.py`.
OBSTACLES = ("text_config", "is_encoder_decoder", "kv_lora_rank", "alibi", "position_embedding_type")


def shape_of(model: str | Path, dtype: str = "auto") -> KVShape:
    """Return the shape that a model's config.json states; the weights need not be there.

    model: bundled name, directory with a config.json, or hub id
    dtype: "auto" is the configuration's own, float32 if it names none

    Raises ModelNotFoundError, UnsupportedModelError, ConfigError.
    """
    found = plain_shape(Path(resolve(model)))
    if found is None:
        from ragcache_plan.configured import configured_shape

        found = configured_shape(model)
    return found if dtype == "auto" else replace(found, dtype=dtype)


def plain_shape(directory: Path) -> KVShape | None:
    """Return the shape that the config.json there states field by field; None if that needs transformers.

    Transformers takes seconds, and is needed for another family, an absent field, rotary scaling, layers of another
    kind, a damaged file or an adapter.
    """
    if (directory / ADAPTER).is_file():
        return None
    try:
        return _stated_shape(json.loads((directory / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # transformers says what is wrong
        return None


def _stated_shape(stated: object) -> KVShape | None:
    """Return the stated shape. Raises TypeError if a name is a list or the like."""
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
    """Return whether rotation is plain. rope: a field as transformers 5 or an older version writes it"""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return False
    return "llama_4_scaling_beta" not in rope and rope.get("rope_type", rope.get("type", "default")) in PLAIN_ROPE


def _width_of_hidden(stated: dict[str, Any]) -> int | None:
    hidden, heads = stated.get("hidden_size"), stated.get("num_attention_heads")
    return hidden // heads if type(hidden) is type(heads) is int and heads else None
