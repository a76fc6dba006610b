"""Shapes read from a config.json alone, against transformers' own configuration classes."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from ragcache.errors import UnsupportedModelError
from ragcache_plan.configured import configured_shape
from ragcache_plan.stated import PLAIN, plain_shape, shape_of

FIELDS = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 96}


def write(directory: Path, **fields: object) -> Path:
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", sorted(PLAIN))
def test_what_transformers_saves_is_read_without_it(family, dtype, tmp_path):
    AutoConfig.for_model(family, **FIELDS, head_dim=32, dtype=dtype).save_pretrained(tmp_path)
    found = plain_shape(tmp_path)
    assert found == configured_shape(tmp_path)
    assert (found.num_layers, found.num_kv_heads, found.head_dim, found.dtype) == (3, 2, 32, dtype)


@pytest.mark.parametrize("more", [
    {},
    {"head_dim": None},
    {"head_dim": 64},
    {"torch_dtype": "bfloat16"},
    {"dtype": None},
    {"num_key_value_heads": None},
    {"num_attention_heads": None},
    {"rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8},
    {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", sorted(PLAIN))
def test_a_field_that_is_absent_is_what_transformers_takes_it_for(family, more, tmp_path):
    """Otherwise the file is left to transformers."""
    fields = {"model_type": family, **FIELDS, **more}
    write(tmp_path, **{name: value for name, value in fields.items() if name not in more or value is not None})
    found = plain_shape(tmp_path)
    assert found is None or found == configured_shape(tmp_path)
    if not more and family != "qwen3":
        assert found is not None


@pytest.mark.parametrize("more", [
    {"layer_types": ["full_attention", "indexed_attention", "full_attention"]},
    {"alibi": True},
    {"is_encoder_decoder": True},
], ids=str)  # fmt: skip
def test_what_cannot_be_moved_is_refused_all_the_same(more, tmp_path):
    write(tmp_path, model_type="llama", **FIELDS, head_dim=16, max_position_embeddings=64, **more)
    with pytest.raises(UnsupportedModelError):
        shape_of(tmp_path)


@pytest.mark.parametrize("more", [
    {"model_type": "gemma3_text"},
    {"model_type": ["llama"]},
    {"num_hidden_layers": "3"},
    {"num_hidden_layers": True},
    {"num_key_value_heads": 0},
    {"dtype": "int8"},
    {"dtype": ["float32"]},
    {"layer_types": [["full_attention"]]},
    {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
    {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}},
    {"rope_scaling": "yarn"},
    {"text_config": {"num_hidden_layers": 2}},
], ids=str)  # fmt: skip
def test_what_is_not_plain_is_left_to_transformers(more, tmp_path):
    write(tmp_path, **{"model_type": "llama", **FIELDS, "head_dim": 16, **more})
    assert plain_shape(tmp_path) is None


def test_an_adapter_beside_a_configuration_is_left_to_transformers(tmp_path):
    write(tmp_path, model_type="llama", **FIELDS, head_dim=16)
    assert plain_shape(tmp_path) is not None
    (tmp_path / "adapter.json").write_text("{}")
    assert plain_shape(tmp_path) is None


def test_no_file_is_no_plain_shape(tmp_path):
    assert plain_shape(tmp_path) is None
    (tmp_path / "config.json").write_bytes(b"\xff{")
    assert plain_shape(tmp_path) is None
