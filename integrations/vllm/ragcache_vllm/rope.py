"""The rotation of a model's keys, found without its weights."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ragcache.errors import UnsupportedModelError
from ragcache.kv.rope import Rope
from ragcache.models.attention import NAME, register
from ragcache.models.support import inspect, refuse_by_config

_SMALL = 16
MOVING = {"longrope", "dynamic"}  # kinds of RoPE whose frequencies depend on the length


def rope_of(config: PreTrainedConfig, name: str, device: torch.device) -> Rope:
    """Return how a model rotates keys, learned from a small random model of the same family, depth, head width and RoPE
    parameters: the rotation depends on nothing else.

    Raises UnsupportedModelError naming the reason.
    """
    refuse_by_config(config, name)
    what = f"{name} ({config.model_type}) is not supported"
    stated = str(getattr(config.get_text_config(decoder=True), "rope_parameters", ""))
    if kinds := MOVING & set(re.findall(r"\w+", stated)):
        reason = f"vLLM chooses the frequencies of {kinds.pop()} by its max_model_len, transformers by the prompt"
        raise UnsupportedModelError(f"{what}: {reason}")
    register()
    try:
        model = AutoModelForCausalLM.from_config(
            _narrowed(config), attn_implementation=NAME, trust_remote_code=False
        ).eval()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{what}: no small model of its kind could be made ({error})") from error
    rope, shape = inspect(model, name)
    if shape.latent:
        raise UnsupportedModelError(f"{what}: its attention keeps latents, which are not placed into vLLM's pages")
    for module in rope.modules:
        module.to(device)
    return rope


def _narrowed(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the same configuration with a single narrow head."""
    narrow = copy.deepcopy(config)
    text: Any = narrow.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = {
        "head_dim": head_dim,
        "hidden_size": head_dim,
        "intermediate_size": _SMALL,
        "moe_intermediate_size": _SMALL,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": _SMALL,
        "pad_token_id": None,
        "dtype": torch.float32,
    }
    for name, value in sizes.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    return narrow
