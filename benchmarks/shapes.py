"""Models of known shapes with random weights: speed depends on the shape, not on what was learnt."""

from __future__ import annotations

import copy
import os
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5TextConfig,
)

from ragcache.kv.block_key import digest
from ragcache.models.attention import NAME, register
from ragcache.models.graphs import use_graphs
from ragcache.models.language_model import LanguageModel
from ragcache.models.load import DTYPES
from ragcache.models.packed import pack
from ragcache.models.support import inspect


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# From the config.json of each model's published directory. "toy" is for tests of the benchmarks themselves.
GRAPH_MEMORY = "RAGCACHE_GRAPH_MEMORY"  # bytes, as the command line's option of that name; 0: no CUDA graphs
SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": _llama3_rope(32.0),
    },
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_parameters": _llama3_rope(8.0),
    },
}

_SECTIONS = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
# Layers with a recurrent state (gated delta rule), three before each of attention. "Qwen3.5-0.8B" has the published
# layers and a small vocabulary, which leaves 515 million parameters; the others are fewer of them, and narrower ones.
HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 8192,
        "max_position_embeddings": 8192,
        "rope_parameters": _SECTIONS,
    },
}
HYBRID_SHAPES["Qwen3.5-0.8B-third"] = {**HYBRID_SHAPES["Qwen3.5-0.8B"], "num_hidden_layers": 8}
HYBRID_SHAPES["toy"] = {
    **HYBRID_SHAPES["Qwen3.5-0.8B"],
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 512,
    "rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 0]},
}


class Built(NamedTuple):
    """One set of weights behind two faces.

    lm:    as ragcache runs it
    plain: as transformers runs it, with scaled_dot_product_attention; nothing of ragcache in it
    """

    lm: LanguageModel
    plain: PreTrainedModel


def build(
    shape: str,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
) -> Built:
    """A model of `shape` with random weights, made on the device in its dtype: no second copy exists at any time."""
    # No EOS: random weights would say it at some point, and decoding is timed over a given number of tokens.
    config = LlamaConfig(rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None, **SHAPES[shape])
    return _build(config, shape, dtype, device, tokenizer, seed)


def build_hybrid(shape: str, dtype: str = "float32", device: str | torch.device = "cpu", seed: int = 0) -> Built:
    """`build` for a shape of HYBRID_SHAPES."""
    sizes = HYBRID_SHAPES[shape]
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (int(sizes["num_hidden_layers"]) // 4)
    no_ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return _build(Qwen3_5TextConfig(layer_types=kinds, **no_ids, **sizes), shape, dtype, device, None, seed)


def build_config(
    config: PreTrainedConfig, name: str, dtype: str = "float32", device: str | torch.device = "cpu", seed: int = 0
) -> Built:
    """`build` for a configuration of any family that transformers has."""
    return _build(config, name, dtype, device, None, seed)


def _build(
    config: PreTrainedConfig,
    shape: str,
    dtype: str,
    device: str | torch.device,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
) -> Built:
    torch.manual_seed(seed)
    with torch.device(device):
        plain = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation="sdpa", trust_remote_code=False
        )
    plain.eval().requires_grad_(False)
    fingerprint = digest({"shape": shape, "seed": seed, "dtype": dtype, "device": str(device)})
    lm = _wrap(_sharing_weights(plain), tokenizer, fingerprint, shape)
    given = os.environ.get(GRAPH_MEMORY)
    use_graphs(lm, int(given) if given else None)  # as a store does that is opened with it
    return Built(lm, plain)


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same parameters in other modules, so that switching the attention of one leaves the other as it is."""
    shared = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    register()
    shared.set_attn_implementation(NAME)
    return shared


def _wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, fingerprint: str, name: str
) -> LanguageModel:
    rope, shape = inspect(model, name)
    pack(model)
    return LanguageModel(model, tokenizer, rope, shape, fingerprint, name)
