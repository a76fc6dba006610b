"""Rules for keys of a GGUF file, and for its keys and tensors that describe positions.

A rule takes the file, its configuration and the key's value, and raises RefusalError if the key cannot be honoured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from ragcache.models.gguf_header import Header


class RefusalError(Exception):
    """The reason why a key cannot be honoured."""


Rule = Callable[[Header, PreTrainedConfig, Any], None]


def ignored(header: Header, config: PreTrainedConfig, value: Any) -> None:
    """Accept any value: it changes neither the model's computation nor the end of answers, or another rule reads it."""


def only(*values: Any) -> Rule:
    """Return a rule that accepts these values alone."""

    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        if value not in values:
            raise RefusalError("no model that ragcache reads from GGUF computes this")

    return rule


def sets(*attributes: str, off: Any = None) -> Rule:
    """Return a rule that sets the first of these attributes that the configuration has.

    off: the value that is accepted if the configuration has none of them, since it means that the setting is off
    """

    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        attribute = next((name for name in attributes if hasattr(config, name)), None)
        if attribute is not None:
            setattr(config, attribute, value)
        elif value != off:
            raise RefusalError(f"transformers' {config.model_type} has no such setting")

    return rule


def only_for(*architectures: str) -> Rule:
    """Return a rule that accepts a key only for these architectures, for which transformers reads it."""

    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        if header.architecture not in architectures:
            raise RefusalError(f"{header.architecture} is not read with it")

    return rule


def head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


ROPE_BASE = 10_000.0  # llama.cpp's, for a file that states none


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the configuration's RoPE parameters, those for full attention if layer types have different ones."""
    rope = config.rope_parameters
    return rope.get("full_attention", rope)  # type: ignore[no-any-return]


def rope_width(header: Header, config: PreTrainedConfig, value: int) -> None:
    width = header.get("attention.key_length", head_dim(config))
    if hasattr(config, "rotary_dim"):
        config.rotary_dim = value
    elif "partial_rotary_factor" in _rope(config):
        _rope(config)["partial_rotary_factor"] = value / width
    elif value != width:
        raise RefusalError(f"transformers' {config.model_type} rotates whole heads, of {width}")


def rope_sections(header: Header, config: PreTrainedConfig, value: list[int]) -> None:
    if [section for section in value if section] != list(_rope(config).get("mrope_section", [])):
        raise RefusalError(f"transformers' {config.model_type} has no such sections")


def rope_base(header: Header, config: PreTrainedConfig, value: float) -> None:
    _rope(config)["rope_theta"] = value


def rope_base_sliding(header: Header, config: PreTrainedConfig, value: float) -> None:
    if "sliding_attention" in config.rope_parameters:
        config.rope_parameters["sliding_attention"]["rope_theta"] = value
    elif value != header.get("rope.freq_base", ROPE_BASE):
        raise RefusalError(f"transformers' {config.model_type} has one base for all layers")


YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rope_scaling(header: Header, config: PreTrainedConfig, _value: Any) -> None:
    """Read all keys about the scaling of positions together. A factor without a type is linear, as in llama.cpp."""
    kind = header.get("rope.scaling.type", "linear")
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear") or 1.0
    attention = header.get("rope.scaling.attn_factor", 1.0)
    rope = _rope(config)
    if kind == "yarn" and factor > 1:
        # llama.cpp's `attn_factor` comes on top of YaRN's own factor.
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": header.get(
                "rope.scaling.original_context_length", header.get("context_length")
            ),
            "attention_factor": attention * (0.1 * math.log(factor) + 1.0),
        }
        rope |= {
            name: header.get(f"rope.scaling.{key}") for key, name in YARN.items() if header.get(f"rope.scaling.{key}")
        }
    elif kind not in ("none", "linear", "yarn"):
        raise RefusalError("positions' frequencies change with the length of the text")
    elif attention != 1.0:
        raise RefusalError(f"rope.scaling.attn_factor {attention} is read with yarn alone")
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}


def rope_freqs(header: Header, config: PreTrainedConfig, _value: Any) -> None:
    """Find the parameters of Llama 3.1's scaling that yield these divisors of the frequencies."""
    rope = _rope(config)
    divisors = header.floats("rope_freqs.weight").astype(np.float64)
    if np.allclose(divisors, 1.0, rtol=1e-6):
        return
    if rope.get("rope_type", "default") != "default":
        raise RefusalError("it comes on top of another scaling")
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(len(divisors)) / len(divisors))
    for original in (8192, *(1 << power for power in range(9, 21))):
        smooth = np.clip((original / wavelengths - 1.0) / 3.0, 0.0, 1.0)  # low and high frequency factor: 1 and 4
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4):
            rope |= {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
            return
    raise RefusalError("its frequencies are not those of Llama 3.1's scaling")


def two_frequencies(header: Header, config: PreTrainedConfig, _value: Any) -> None:
    raise RefusalError("positions' frequencies change with the length of the text")
