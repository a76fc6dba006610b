"""Models as users have them: a loaded one, a LoRA adapter beside its base, and their names in block keys."""

import json
import shutil

import pytest
import torch
from kit.makers import tiny_directory
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_model import PROMPT, last_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

import ragcache as rc
from ragcache.errors import AdapterError, ConfigError, ModelMismatchError, ModelNotFoundError
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_vllm.merged_adapter import servable

base = tiny_directory()


@pytest.fixture(scope="module")
def lora(base, tmp_path_factory):
    """An adapter whose matrices are not zero, as peft writes it."""
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    path = tmp_path_factory.mktemp("lora") / "adapter"
    get_peft_model(plain(base), config).save_pretrained(path)
    return path


def plain(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


# A loaded model


def test_a_loaded_model_answers_as_its_directory_does(base):
    by_name = rc.load_lm(base)
    model = plain(base)
    expected = last_logits(model)
    taken = rc.load_lm(model)
    torch.testing.assert_close(rc.fuse(taken, PROMPT, method="full").next_logits, expected, atol=1e-4, rtol=1e-4)
    for method in ("reposition", "cacheblend"):
        right = rc.fuse(by_name, PROMPT, method=method).next_logits
        torch.testing.assert_close(rc.fuse(taken, PROMPT, method=method).next_logits, right, atol=1e-5, rtol=1e-5)
    assert taken.fingerprint == by_name.fingerprint
    assert (taken.name, taken.tokenizer.get_vocab()) == ("loaded:tiny", by_name.tokenizer.get_vocab())
    again = rc.load_lm(model)  # its modules are not hooked twice
    torch.testing.assert_close(rc.fuse(again, PROMPT).next_logits, rc.fuse(by_name, PROMPT).next_logits)


def test_a_store_takes_a_loaded_model_and_wants_it_again(base, tmp_path):
    model = plain(base)
    with torch.no_grad():
        model.lm_head.weight += 0.1  # other weights than those of its directory
    for _ in range(2):
        with rc.RagCache.open(tmp_path / "kb", model=model, method="reposition", embedder=BagOfWords()) as kb:
            kb.ingest([rc.Document("dogs", "Dogs bark at night.")])
            assert kb.ask("Who barks?", sampling=rc.Sampling(2)).hits[0].kv in ("memory", "disk")
            assert "checkpoint" not in kb.store.documents.properties()
    with pytest.raises(ModelNotFoundError, match=r"made with a loaded model \(loaded:tiny\); give it again"):
        rc.RagCache.open(tmp_path / "kb", embedder=BagOfWords())
    other = rc.load_lm(base)
    with pytest.raises(
        ModelMismatchError, match=f"made with loaded:tiny in float32, not with {base} in float32"
    ) as told:
        rc.RagCache.open(tmp_path / "kb", model=other, embedder=BagOfWords())
    assert other.fingerprint not in str(told.value)
    with pytest.raises(ConfigError, match="dtype 'bfloat16' was given beside a loaded model"):
        rc.RagCache.open(tmp_path / "kb", model=model, dtype="bfloat16", embedder=BagOfWords())


def test_a_tokenizer_may_be_given_with_it(base):
    model = plain(base)
    model.name_or_path = ""
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert rc.load_lm(model, tokenizer=tokenizer).tokenizer is tokenizer
    with pytest.raises(ConfigError, match="has no tokenizer"):
        _ = rc.load_lm(model).tokenizer


@pytest.mark.parametrize("what", [5, None, ["mini"]])
def test_what_is_no_model_is_refused_with_the_way_out(what):
    with pytest.raises(ConfigError, match="name a model or its directory, or give a model of transformers"):
        rc.load_lm(what)


# LoRA


def test_a_lora_directory_is_its_base_with_the_adapter_merged(base, lora):
    expected = last_logits(PeftModel.from_pretrained(plain(base), lora))  # beside the weights, not merged
    lm = rc.load_lm(lora)
    torch.testing.assert_close(rc.fuse(lm, PROMPT, method="full").next_logits, expected, atol=1e-4, rtol=1e-4)
    assert (last_logits(plain(base)) - expected).abs().max() > 0.1
    assert lm.fingerprint != rc.load_lm(base).fingerprint
    assert len(lm.tokenizer) == 258  # the base's, where the adapter has none


def test_another_engine_cannot_have_what_is_merged_here(lora, tmp_path):
    assert checkpoint_digest(str(lora)) is None
    with pytest.raises(AdapterError, match="no directory holds this model's weights; write them with load_lm"):
        servable(str(lora), "", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": "/nowhere"}, r"no directory /nowhere; .*adapter_config.json under \"base_model"),
        ({"base_model_name_or_path": None}, "adapter of None; only LoRA adapters that name their base"),
        ({"peft_type": "PROMPT_TUNING"}, "a PROMPT_TUNING adapter of"),
        ({"r": "four"}, "damaged"),
    ],
)
def test_a_lora_that_cannot_be_merged_says_why(lora, tmp_path, changes, message):
    path = shutil.copytree(lora, tmp_path / "broken")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(AdapterError, match=message):
        rc.load_lm(path)


def test_a_lora_without_its_weights_is_damaged(lora, tmp_path):
    path = shutil.copytree(lora, tmp_path / "bare")
    (path / "adapter_model.safetensors").write_bytes(b"none")
    with pytest.raises(AdapterError, match="damaged"):
        rc.load_lm(path)


# A model's name in block keys: another one for whatever changes a key, a value or a token.


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
def test_it_changes_with(base, tmp_path, change):
    other = shutil.copytree(base, tmp_path / "model")
    same = rc.load_lm(other).fingerprint
    assert same == rc.load_lm(base).fingerprint, "the directory's name is no part of it"
    change(other)
    assert rc.load_lm(other).fingerprint != same


def test_it_changes_with_the_precision(base):
    assert rc.load_lm(base, dtype="bfloat16").fingerprint != rc.load_lm(base).fingerprint


def test_it_does_not_change_with_what_changes_no_key(base, tmp_path):
    other = shutil.copytree(base, tmp_path / "model")
    config(transformers_version="0.0", _name_or_path="elsewhere", use_cache=False)(other)
    assert rc.load_lm(other).fingerprint == rc.load_lm(base).fingerprint
