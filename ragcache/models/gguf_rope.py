"""Rules for the keys and tensors of a GGUF file that describe positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from ragcache.models.gguf_header import Header
from ragcache.models.gguf_rules import RefusalError, head_dim

ROPE_BASE = 10_000.0  # llama.cpp's, for a file that states none


def _rope(config: PreTrainedConfig, kind: str = "full_attention") -> dict[str, Any]:
    """Return the configuration's RoPE parameters, those for `kind` if layer types have different ones."""
    rope = config.rope_parameters
    return rope.get(kind, rope)  # type: ignore[no-any-return]


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
