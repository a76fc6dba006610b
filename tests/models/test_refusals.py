"""Models whose keys cannot be moved exactly are refused by name, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import SMALL, save_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, T5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ragcache as rc
from ragcache.errors import ConfigError, ModelNotFoundError


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "ALiBi in name": ("falcon", {"alibi": True, "new_decoder_architecture": False}, "ALiBi"),
    "ALiBi in fact": ("bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "learned positions": ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}, "learned"),
    "state space": ("mamba", {"state_size": 8}, "keep a state"),
    "hybrid": ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 2}, "keep a state"),
    "keys chosen by an index": ("deepseek_v32", {"kv_lora_rank": 16, "q_lora_rank": 16}, "indexed_attention"),
    "own attention": ("gptj", {"n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "attention interface"),
    "encoder-decoder": ("t5", {"d_model": 48}, "encoder-decoder"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused_by_name(case, tmp_path):
    kind, extra, reason = REFUSED[case]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SMALL, "num_hidden_layers": 2, **extra})
    build = T5ForConditionalGeneration if kind == "t5" else AutoModelForCausalLM.from_config
    build(config).save_pretrained(tmp_path)
    with pytest.raises(rc.UnsupportedModelError, match=reason) as caught:
        rc.load_lm(tmp_path)
    assert kind in str(caught.value)


def test_a_directory_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
        rc.load_lm(tmp_path)


def test_an_unknown_hub_id_is_named():
    with pytest.raises(ModelNotFoundError, match="nobody/nothing"):
        rc.load_lm("nobody/nothing")


def test_missing_weights_are_a_model_error(tmp_path):
    save_tiny("llama", str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"weights|file"):
        rc.load_lm(tmp_path)


def test_damaged_weights_are_a_model_error(tmp_path):
    save_tiny("llama", str(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ModelNotFoundError, match=tmp_path.name):
        rc.load_lm(tmp_path)


def test_a_lacking_weight_is_a_model_error(tmp_path):
    save_tiny("llama", str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match="up_proj"):
        rc.load_lm(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("dtype", "int8"), ("device", "quantum")])
def test_unknown_dtype_and_device(tmp_path, name, value):
    save_tiny("llama", str(tmp_path))
    with pytest.raises(ConfigError, match=value):
        rc.load_lm(tmp_path, **{name: value})
