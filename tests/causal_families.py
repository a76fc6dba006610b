"""Tiny random models of every causal family that the installed transformers has."""

import inspect
from typing import Any

import torch
from families import VOCAB
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

CAUSAL_FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Those that read images and have no causal language model of their own: their text part is read through the whole.
IMAGE_FAMILIES = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(CAUSAL_FAMILIES))
LARGEST_PARAMETERS = 40_000_000
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Latent attention has no head_dim of its own choice, and as many heads of keys as of queries.
LATENT_SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_OF_HALF = {**_SECTIONS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_WHOLE = ("qwen2_5_vl_text", "paddleocr_vl_text", "qwen2_5_omni_text")
_PARTIAL = ("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glmga_text")
RECURRENT_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
# By a configuration's own type, wherever it is a part: rotary sections, of which a small head has few, and layers that
# two by default would not have.
PARTS: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": _SECTIONS} for name in _WHOLE},
    **{name: {"rope_parameters": _OF_HALF} for name in _PARTIAL},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), RECURRENT_AND_FULL),
}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
# What the sizes above do not fit.
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": {"n_group": 1, "topk_group": 1},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "blenderbot": {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCAB},
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "dots1": {"first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {"layer_types": SLIDING_AND_FULL, "num_kv_shared_layers": 0},
    "gemma4_text": {"layer_types": SLIDING_AND_FULL},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, **RECURRENT_AND_FULL},
    "kimi_linear": RECURRENT_AND_FULL,
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "longcat_flash": {"num_layers": 1, "head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "qwen3_5_moe_text": RECURRENT_AND_FULL,
    "qwen3_5_text": RECURRENT_AND_FULL,
    "qwen3_next": RECURRENT_AND_FULL,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48]},
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "xlnet": {"d_head": 16},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
# What cannot be made of sizes alone.
UNBUILT = {
    "dbrx": "its small configuration does not come back from a directory as it was saved",
    "gemma3n": "its vision tower needs timm",
    "cohere_compass_text": "its rotary module takes no small head",
    "chameleon": "its vocabulary is read from a table of image tokens",
    "cohere_compass": "its rotary module takes no small head",
    "cosmos3_edge": "its rotary sections do not fit a small head",
    "deepseek_ocr2": "its vision tower takes no small sizes",
    "diffusion_gemma": "it is put together from other models",
    "ernie4_5_vl_moe": "it wants one width of experts for each modality",
    "evolla": "it reads proteins, and transformers' automatic class does not make it",
    "fast_vlm": "its vision tower needs timm",
    "florence2": "its vision tower takes no small sizes",
    "glm5_next": "its configuration takes no small head",
    "granite4_vision": "its parts take no small sizes",
    "janus": "its vision tower takes no small sizes",
    "muse_glimmer": "its vision tower takes no small sizes",
    "nemotron_h_omni": "its parts take no small sizes",
    "perception_lm": "its vision tower needs timm",
    "qwen2_vl": "its vision tower takes no small sizes",
    "step3p7": "its small configuration states no window for its sliding layers",
    "shieldgemma2": "it classifies and gives out no text",
    "vision-encoder-decoder": "it is put together from two other models",
    "gemma4_assistant": "it drafts for another model and has no vocabulary of its own",
    "gemma4_unified_assistant": "it drafts for another model and has no vocabulary of its own",
    "musicgen": "it is put together from three other models",
    "musicgen_melody": "it is put together from three other models",
}


def causal_config(family: str) -> PreTrainedConfig:
    """The family's own defaults at the smallest sizes."""
    return _small(CONFIG_MAPPING[family], OVERRIDES.get(family, {}))


def _small(kind: type[PreTrainedConfig], more: dict[str, Any]) -> PreTrainedConfig:
    more = {**PARTS.get(kind.model_type, {}), **more}
    names = set(inspect.signature(kind).parameters) | set(kind.attribute_map)
    chosen = SIZES
    if "kv_lora_rank" in names:
        chosen = {name: value for name, value in SIZES.items() if name != "head_dim"} | LATENT_SIZES
    sizes = {name: value for name, value in chosen.items() if name in names}
    parts = {name: getattr(kind(), name, None) for name in kind.sub_configs if name not in more}
    small = {
        name: _small(type(part), {}).to_dict() for name, part in parts.items() if isinstance(part, PreTrainedConfig)
    }
    return kind(**{**sizes, **small, **more})


def causal_model(family: str) -> PreTrainedModel:
    """Random weights that leave no part without effect: norms scale by anything but 1."""
    config = causal_config(family)
    kind = AutoModelForImageTextToText if family in IMAGE_FAMILIES else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind.from_config(config).parameters())
    if size > LARGEST_PARAMETERS:
        raise ValueError(f"{family} has {size} parameters; make it smaller in OVERRIDES")
    torch.manual_seed(0)
    model = kind.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.3)
            else:
                weight.uniform_(0.5, 1.5)
    return model
