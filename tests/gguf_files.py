"""GGUF files of tiny models that transformers makes, with any keys, and llama.cpp's logits over one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|bos|>", "<|eos|>", "<|eot|>"]
BOS, EOS, EOT = 257, 258, 259
NAMES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gemma3_text": "gemma3"}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 257 + [3] * 3,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": EOS,
}


def write(
    path: Path, model: PreTrainedModel, keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
) -> Path:
    """Write a model as llama.cpp's converter would.

    keys: further ones or others; a key without a prefix of its own is the architecture's, None leaves it out
    tensors: further ones; None leaves one out
    """
    gguf = pytest.importorskip("gguf")
    config = model.config
    kind = NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), kind)
    for key, value in (shape_keys(config) | TOKENIZER | (keys or {})).items():
        if value is not None:
            add(
                writer,
                key if key.split(".")[0] in ("tokenizer", "general", "split", "vendor") else f"{kind}.{key}",
                value,
            )
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored = {}
    for name, weights in model.state_dict().items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            stored |= converted(kind, name, weights.float().numpy(), names, config)
    for name, weights in (stored | (tensors or {})).items():
        if weights is not None:
            writer.add_tensor(name, np.ascontiguousarray(weights, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shape_keys(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1.0)),
    }
    if config.model_type.startswith("gemma"):
        found |= {"attention.sliding_window": config.sliding_window}
    if config.model_type.endswith("moe"):
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return found


def add(writer: Any, key: str, value: Any) -> None:
    methods = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    methods.get(type(value), writer.add_array)(key, value)


def converted(kind: str, name: str, weights: Any, names: Any, config: Any) -> dict[str, Any]:
    """A parameter under llama.cpp's names, as its converter lays it out."""
    part, dot, suffix = name.rpartition(".")
    if name.endswith("experts.gate_up_proj"):
        layer = name.split(".")[2]
        gate, up = np.split(weights, 2, axis=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    if suffix not in ("weight", "bias"):
        part, dot, suffix = name, ".", "weight"
    if kind == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = weights.reshape(heads, 2, -1, *weights.shape[1:])
        weights = halves.swapaxes(1, 2).reshape(weights.shape)
    if name.endswith("shared_expert_gate.weight"):
        weights = weights[0]
    if kind.startswith("gemma") and "norm" in name:
        weights = weights + 1
    return {f"{names.get_name(part)}{dot}{suffix}": weights}


def llama_cpp_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """llama.cpp's own logits behind these ids. Skips the test where llama-cpp-python is not installed."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama.cpp's logits need llama-cpp-python, which is built from source"
    )
    model = llama_cpp.Llama(
        str(path), n_ctx=512, n_threads=1, type_k=0, type_v=0, flash_attn=False, verbose=False, logits_all=True
    )
    model.eval(ids)
    return torch.tensor(np.array(model.scores[len(ids) - 1]))
