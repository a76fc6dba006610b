"""Write a Llama checkpoint in Hugging Face's layout as a GGUF file. Needs gguf and safetensors, not torch.

The file's tensor names and keys are those of llama.cpp's documentation of GGUF. It differs from the checkpoint in two
ways: rows of the query and key projections are in pairs, since llama.cpp rotates neighbouring values where transformers
rotates halves; and if the tokenizer has fewer tokens than the model, unused tokens are added to the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float32]
TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """Write a model. model: directory with config.json, float32 model.safetensors and a byte-level BPE tokenizer.json.

    Matrices are written in `dtype`, rounded to nearest even; norms stay float32, as llama.cpp requires.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, config)
    _write_vocabulary(writer, json.loads((model / "tokenizer.json").read_text(encoding="utf-8")), config["vocab_size"])
    for name, weights in load_file(model / "model.safetensors").items():
        _write_tensor(writer, _name(name), _paired(name, weights, config), dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], size: int) -> None:
    by_id = {id: text for text, id in tokenizer["model"]["vocab"].items()}
    special = {one["id"] for one in tokenizer["added_tokens"]}
    by_id |= {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    kinds = [_kind(id, by_id, special) for id in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(id, f"[PAD{id}]") for id in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(min(special, default=0))
    writer.add_eos_token_id(min(special, default=0))
    writer.add_add_bos_token(False)


def _kind(id: int, by_id: dict[int, str], special: set[int]) -> gguf.TokenType:
    if id not in by_id:
        return gguf.TokenType.UNUSED
    return gguf.TokenType.CONTROL if id in special else gguf.TokenType.NORMAL


def _write_tensor(writer: gguf.GGUFWriter, name: str, weights: Array, dtype: str) -> None:
    kind = TYPES[dtype] if weights.ndim > 1 else gguf.GGMLQuantizationType.F32
    data = gguf.quants.quantize(np.ascontiguousarray(weights, dtype=np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _name(name: str) -> str:
    """Map model.layers.3.mlp.up_proj.weight to blk.3.ffn_up.weight. Raises KeyError for a name that no Llama has."""
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{PARTS[part.removesuffix('.weight')]}.weight"


def _paired(name: str, weights: Array, config: dict[str, Any]) -> Array:
    """Reorder rows of each head: 0, n/2, 1, n/2 + 1, ... of query and key projections; others are unchanged."""
    by_part = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    heads = next((count for part, count in by_part.items() if part in name), None)
    if heads is None:
        return weights
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, weights.shape[1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
