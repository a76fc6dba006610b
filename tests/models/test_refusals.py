"""Models whose keys cannot be moved exactly are refused by name, with the reason; what loading asks them: rounding is
no reason to refuse one in any dtype, wrongly moved keys are."""

import io
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from families import (
    FAMILIES,
    LATENT,
    SMALL,
    assert_same,
    block_diagonal,
    load_tiny,
    oracle_logits,
    oracle_model,
    own_directory,
    random_prompt,
    save_tiny,
    saved_tiny,
    tiny,
)
from safetensors.torch import load_file, save_file
from tiny_model import byte_tokenizer
from transformers import AutoModelForCausalLM, T5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, ModelMismatchError, ModelNotFoundError
from ragcache.kv.rope import Angles, Rope
from ragcache.models import attention, support


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


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_models_own_code_is_refused_and_never_runs(file, tmp_path, monkeypatch):
    directory = Path(save_tiny("llama", str(tmp_path / "model")))
    byte_tokenizer().save_pretrained(directory)
    (directory / "own.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    kind = {"model_type": "own"} if file == "config.json" else {"tokenizer_class": "Own"}
    stated = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps({**stated, **kind, "auto_map": own}))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(rc.UnsupportedModelError, match=rf"auto_map \({file}: .*own\.Own.*part of transformers"):
        rc.load_lm(directory)
    assert not (tmp_path / "ran").exists()


def lacks_a_weight(directory):
    weights = load_file(directory / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def is_said_to_be(kind, **more):
    def change(directory):
        config = json.loads((directory / "config.json").read_text())
        changed = {**config, **more, "model_type": kind, "architectures": None}
        (directory / "config.json").write_text(json.dumps(changed))

    return change


LATENTS = {name: value for name, value in LATENT.items() if name.endswith(("_rank", "_dim"))}
DAMAGES = [
    ("llama", lambda d: [path.unlink() for path in d.iterdir()], "{directory}"),
    ("llama", lambda d: (d / "model.safetensors").unlink(), "weights|file"),
    ("llama", lambda d: (d / "model.safetensors").write_bytes(b"x" * 200), "{directory}"),
    ("llama", lacks_a_weight, "up_proj"),
    # Qwen2's projections have biases, which Llama would leave out without a word.
    ("qwen2", is_said_to_be("llama"), r"says llama, .*k_proj\.bias has no place in it; get the config"),
    ("llama", is_said_to_be("deepseek_v3", **LATENTS), "says deepseek_v3, .* other shapes; get the config"),
]


@pytest.mark.parametrize(("family", "damage", "said"), DAMAGES)
def test_a_directory_that_holds_no_whole_model_is_named(family, damage, said, tmp_path):
    save_tiny(family, str(tmp_path))
    damage(tmp_path)
    with pytest.raises(ModelNotFoundError, match=said.replace("{directory}", tmp_path.name)):
        rc.load_lm(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("dtype", "int8"), ("device", "quantum")])
def test_unknown_dtype_and_device(name, value):
    with pytest.raises(ConfigError, match=value):
        rc.load_lm(saved_tiny("llama"), **{name: value})


def test_mixed_dtypes_are_named_with_the_way_out():
    model = AutoModelForCausalLM.from_pretrained(saved_tiny("llama"))
    model.model.layers[1].self_attn.v_proj.to(torch.bfloat16)
    with pytest.raises(rc.UnsupportedModelError, match=r"weights mix bfloat16 and float32: bring it to one dtype"):
        rc.load_lm(model)


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_checkpoint_of_mixed_dtypes_is_read_in_one(dtype, tmp_path):
    """In that of its config.json, or in the one that is asked for, as plain transformers reads it."""
    save_tiny("llama", str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    mixed = {name: weight.bfloat16() if "layers.1." in name else weight for name, weight in weights.items()}
    assert len({weight.dtype for weight in mixed.values()}) == 2
    save_file(mixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    lm, prompt = rc.load_lm(tmp_path, dtype=dtype), random_prompt(2)
    assert {weight.dtype for weight in lm.model.parameters()} == {lm.dtype}
    assert lm.dtype == (torch.float32 if dtype == "auto" else torch.float16)
    if dtype == "auto":
        theirs = oracle_logits(oracle_model(str(tmp_path)), prompt, block_diagonal(prompt))
        assert_same(rc.fuse(lm, prompt, "reposition").next_logits, theirs)


# Lengths beyond which a model reads a passage otherwise by where it stands.
ENDS = {
    "phi3-long": (128, "LongRoPE takes other frequencies"),
    "ministral3": (128, "queries grow with their position"),
    "llama4": (128, "one chunk of its attention"),
}


@pytest.mark.parametrize("family", sorted(ENDS))
def test_prompts_are_exact_up_to_the_length_that_changes_the_model_and_refused_beyond(family):
    longest, reason = ENDS[family]
    lm, oracle = tiny(family)
    prompt = random_prompt(3, prefix=5, chunks=(60, longest - 71), suffix=6)
    assert prompt.num_tokens == longest
    fused = rc.fuse(lm, prompt, "reposition", recipe="isolated")
    assert_same(fused.next_logits, oracle_logits(oracle, prompt, block_diagonal(prompt)))
    longer = rc.Prompt(prompt.prefix_ids, prompt.chunk_ids, [*prompt.suffix_ids, 7])
    for method in ("reposition", "full"):
        with pytest.raises(ContextTooLongError, match=rf"takes {longest}.*{reason}.*; use fewer or shorter chunks"):
            rc.fuse(lm, longer, method)


def test_longrope_by_its_long_factors_is_exact_beyond_and_never_shares_kv_with_the_short_class(tmp_path):
    short, oracle = load_tiny("phi3-long", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    lm = rc.load_lm(tmp_path)
    prompt = random_prompt(6, prefix=5, chunks=(70, 60, 40), suffix=6)  # by its long factors in plain transformers too
    fused = rc.fuse(lm, prompt, "reposition", recipe="isolated")
    assert_same(fused.next_logits, oracle_logits(oracle, prompt, block_diagonal(prompt)))
    assert lm.fingerprint != short.fingerprint


def test_a_store_of_another_length_class_is_refused(tmp_path):
    """Its KV was made by the short factors; by the long ones it would be another model's."""
    kind, sizes = FAMILIES["phi3-long"]
    config = CONFIG_MAPPING[kind](**{**SMALL, **sizes, "vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257})
    model, kb, sampling = tmp_path / "model", tmp_path / "kb", rc.Sampling(max_tokens=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    with rc.RagCache.open(kb, model=model, method="reposition") as store:
        store.ingest(rc.Document("cats", "The cat sat on the mat."))
        assert store.ask("Where?", k=1, sampling=sampling).usage.cached_tokens
        with pytest.raises(ContextTooLongError, match=r"takes 128.*ask a shorter one"):
            store.ask("Where? " * 30, k=1, sampling=sampling)
    stated = json.loads((model / "config.json").read_text())
    stated["rope_parameters"]["short_factor"] = stated["rope_parameters"]["long_factor"]
    (model / "config.json").write_text(json.dumps(stated))
    for named in ({}, {"model": model}):
        with pytest.raises(ModelMismatchError, match=r"configuration .*changed.*; use that one, or make a new store"):
            rc.RagCache.open(kb, method="reposition", **named)


def test_dynamic_ntk_is_exact_up_to_its_longest_prompt(tmp_path):
    torch.manual_seed(0)
    rope = _rope("dynamic", factor=2.0)
    config = CONFIG_MAPPING["llama"](**{**SMALL, **rope, "max_position_embeddings": 64})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lm, oracle = rc.load_lm(tmp_path), oracle_model(str(tmp_path))
    prompt = random_prompt(4, prefix=5, chunks=(30, 23), suffix=6)
    fused = rc.fuse(lm, prompt, "reposition", recipe="isolated")
    assert_same(fused.next_logits, oracle_logits(oracle, prompt, block_diagonal(prompt)))
    with pytest.raises(ContextTooLongError, match="takes 64"):
        rc.fuse(lm, random_prompt(4, prefix=6, chunks=(30, 23), suffix=6), "reposition")


REAL_MODEL = "RAGCACHE_TEST_MODEL"
DTYPES = ["float32", "bfloat16", "float16"]
SPECIAL_IDS = range(8)
# By family: the massive activation, the weight by which queries and keys see it, the pair of dimensions that does, and
# the number of layers over which rounding adds up.
MASSIVE = {"llama": (20.0, 15.0, (3, 9), 16), "phi3": (20.0, 10.0, (2, 8), 8), "glm4": (100.0, 10.0, (2, 3), 8)}


@cache
def save_massive(family: str) -> str:
    """A model whose special tokens all have one huge activation, as real models' have: scores among them are huge and
    nearly equal, so that their rounding decides who attends to whom, and values do not see it."""
    size, weight, pair, layers = MASSIVE[family]
    kind, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SMALL, **extra, "num_hidden_layers": layers, "head_dim": 12})
    model = AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads + config.num_key_value_heads
    with torch.no_grad():
        model.get_input_embeddings().weight[SPECIAL_IDS, 0] = size
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
                parameter.view(-1, 12, config.hidden_size)[:heads, pair, 0] = weight
            if name.endswith(("v_proj.weight", "qkv_proj.weight")):
                parameter[-12 * config.num_key_value_heads :, 0] = 0
    directory = own_directory(family)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("family", "dtype"), covering(sorted(MASSIVE), DTYPES))
def test_massive_activations_are_no_reason_to_refuse(monkeypatch, family, dtype):
    assert rc.load_lm(save_massive(family), dtype=dtype).shape.num_layers == MASSIVE[family][3]
    ids = torch.tensor([list(SPECIAL_IDS)[1:6]])  # not even where the probe asks these very tokens
    monkeypatch.setattr(support, "_probe_ids", lambda model: (ids, torch.arange(5)[None]))
    assert rc.load_lm(save_massive(family), dtype=dtype).shape.num_layers == MASSIVE[family][3]


def interleaved(width: int) -> torch.Tensor:
    """Where each dimension of halves stands among interleaved pairs."""
    return torch.arange(width).view(2, -1).T.flatten()


def wrong_sign(apply):
    return lambda query, key, cos, sin: apply(query, key, cos, -sin)


def wrong_pairs(apply):
    def rotate(query, key, cos, sin):
        order = interleaved(key.shape[-1])
        moved = apply(query[..., order], key[..., order], cos, sin)
        return tuple(part[..., order.argsort()] for part in moved)

    return rotate


@pytest.mark.parametrize(
    ("family", "wrong", "dtype"),
    covering(sorted(MASSIVE), [wrong_sign, wrong_pairs], DTYPES, together=[(0, 1), (1, 2)]),
)
def test_keys_that_are_rotated_wrongly_are_refused(monkeypatch, family, wrong, dtype):
    honest = support._rotation_function
    monkeypatch.setattr(support, "_rotation_function", lambda *given: wrong(honest(*given)))
    with pytest.raises(rc.UnsupportedModelError, match=r"layer 0's keys does not give the model's own"):
        rc.load_lm(save_massive(family), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-1, 1])
def test_keys_that_are_scaled_twice_or_never_are_refused(monkeypatch, power, dtype):
    """YaRN scales cos and sin, by 1.14 in this model."""
    honest = Rope._compute

    def scaled(rope, kind, end):
        cos, sin, half = honest(rope, kind, end)
        factor = kind[0][0].attention_scaling ** power
        return Angles(cos * factor, sin * factor, half)

    monkeypatch.setattr(Rope, "_compute", scaled)
    with pytest.raises(rc.UnsupportedModelError, match="layer 0's keys does not give the model's own"):
        rc.load_lm(saved_tiny("llama-yarn"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_are_scaled_wrongly_are_refused(monkeypatch, dtype):
    honest = attention._attend_encoded

    def wrong(query, key, value, window, scoring):
        moved = attention.CURRENT.get().rope is not None
        return honest(query * 2 if moved else query, key, value, window, scoring)

    monkeypatch.setattr(attention, "_attend_encoded", wrong)
    with pytest.raises(rc.UnsupportedModelError, match=r"layer 0's attention .* \(recipe isolated\)"):
        rc.load_lm(saved_tiny("llama"), dtype=dtype)


@pytest.mark.skipif(not os.environ.get(REAL_MODEL), reason=f"{REAL_MODEL} names no directory with a real model")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_model_loads(dtype):
    lm = rc.load_lm(os.environ[REAL_MODEL], dtype=dtype, packed=False)
    assert str(lm.dtype) == f"torch.{dtype}"
