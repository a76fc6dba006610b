"""A model's name in block keys: another one for whatever changes a key, a value or a token."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_llama

import ragcache as rc


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


def edited(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def config(**values):
    return lambda directory: edited(directory / "config.json", lambda content: content.update(values))


def rope(**values):
    return config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **values})


def swap_two_tokens(directory):
    """The same vocabulary, with the ids of two tokens exchanged."""

    def swap(content):
        ids = content["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]

    edited(directory / "tokenizer.json", swap)


def lowercase(directory):
    """The same ids for the same tokens; another text before it is cut."""
    edited(directory / "tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"}))


def forget_the_tokenizer(directory):
    for file in directory.glob("tokenizer*"):
        file.unlink()


def change_one_weight(directory):
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    weights[name][-1, -1] += 1e-3
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        swap_two_tokens,
        lowercase,
        forget_the_tokenizer,
        rope(rope_theta=20000.0),
        rope(rope_type="linear", factor=2.0),
        config(rms_norm_eps=1e-4),
        change_one_weight,
    ],
    ids=["token ids", "normaliser", "no tokenizer", "theta", "rope type", "configuration", "weight"],
)
def test_it_changes_with(saved, tmp_path, change):
    other = shutil.copytree(saved, tmp_path / "model")
    same = rc.load_lm(other).fingerprint
    assert same == rc.load_lm(saved).fingerprint, "the directory's name is no part of it"
    change(other)
    assert rc.load_lm(other).fingerprint != same


def test_it_changes_with_the_precision(saved):
    assert rc.load_lm(saved, dtype="bfloat16").fingerprint != rc.load_lm(saved).fingerprint


def test_it_does_not_change_with_what_changes_no_key(saved, tmp_path):
    other = shutil.copytree(saved, tmp_path / "model")
    config(transformers_version="0.0", _name_or_path="elsewhere", use_cache=False)(other)
    assert rc.load_lm(other).fingerprint == rc.load_lm(saved).fingerprint
