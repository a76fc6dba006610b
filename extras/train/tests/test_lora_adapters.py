"""LoRA's adapters: peft reads them over a resized base, and `load_lm` serves them merged."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import reuse_oracle as oracle
import torch
from families import masks_of
from peft import LoraConfig, PeftModel, get_peft_model
from run_options import QA_LINES, engine_prompt, log_of, run_options
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_llama
from transformers import AutoModelForCausalLM, get_scheduler

import ragcache as rc
from ragcache.errors import AdapterError, ConfigError
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.trainer import ReuseTrainer, train
from ragcache_vllm.merged_adapter import servable

LINK = TrainedTokens("link", "isolated", 2, 4, 258, 266, 267)


def save_base(directory, tied):
    save_tiny_llama(directory)
    if tied:
        weights, config = (
            load_file(directory / "model.safetensors"),
            json.loads((directory / "config.json").read_text()),
        )
        del weights["lm_head.weight"]
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the directory of a model whose head shares the embedding's weights."""
    return save_base(tmp_path_factory.mktemp("base"), tied=True)


def options_of(base, folder):
    return run_options(base, folder, QA_LINES, lora_rank=3, learning_rate=3e-2)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """Return the directory of an adapter after four steps of training."""
    return train(replace(options_of(base, tmp_path_factory.mktemp("trained")), steps=4)).out


@pytest.fixture
def options(base, tmp_path):
    return options_of(base, tmp_path)


@pytest.fixture
def adapter(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "adapter")


def by_peft(base, adapter, tokens):
    """Return the last token's logits by peft with the base's weights, under the papers' mask."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    vocab_size = max([258, *(token.id + 1 for token in tokens), *ids_in(adapter)])
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    adapted = PeftModel.from_pretrained(model, adapter).eval()
    positions = [token.position for token in tokens]
    with torch.no_grad():
        return adapted(
            input_ids=torch.tensor([[token.id for token in tokens]]),
            position_ids=torch.tensor([positions]),
            attention_mask=masks_of(model, oracle.allowed(tokens), positions),
        ).logits[0, -1, :258]


def ids_in(adapter):
    stated = json.loads((adapter / "adapter_config.json").read_text())["trainable_token_indices"] or {}
    return [id + 1 for ids in stated.values() for id in ids]


@pytest.mark.parametrize(
    ("changes", "method", "tied"),
    [
        pytest.param({}, "link", True, marks=pytest.mark.slow),
        ({}, "link", False),
        pytest.param({"reuse": "markers"}, "markers", False, marks=pytest.mark.slow),
        ({"link_tokens": 0}, "reposition", True),
    ],
    ids=["link", "link with a head of its own", "markers", "block-attention"],
)
def test_peft_reads_what_was_trained_and_the_engine_serves_the_same(options, tmp_path, changes, method, tied):
    base = save_base(tmp_path / "base", tied)
    out = train(replace(options, model=base, steps=3, **changes)).out
    lm = rc.load_lm(out)
    prompt = engine_prompt(lm.tokenizer)
    parts = prompt.prefix_ids, prompt.chunk_ids, [prompt.suffix_ids]
    for one, tokens in ((method, oracle.apart(lm.reuse, *parts)), ("full", oracle.together(*parts))):
        ours = rc.fuse(lm, prompt, one).next_logits[:258]
        torch.testing.assert_close(ours, by_peft(base, out, tokens), atol=2e-4, rtol=2e-4)
    plain = rc.fuse(rc.load_lm(base), prompt, "full").next_logits
    assert (rc.fuse(lm, prompt, "full").next_logits[:258] - plain).abs().max() > 0.01


def test_an_adapter_holds_no_copy_of_its_base(base, trained):
    names = {path.name for path in trained.iterdir()}
    assert {"adapter.json", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"config.json", "model.safetensors", "adapter.safetensors"} & names
    written = json.loads((trained / "adapter.json").read_text())
    assert (written["version"], written["base"]["name"]) == (2, str(base))
    assert written["base"]["checkpoint"] == checkpoint_digest(str(base))
    assert written["ragcache"] == LINK.section()
    assert json.loads((trained / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    matrices = sum(3 * sum(w.shape) for n, w in load_file(base / "model.safetensors").items() if "_proj" in n)
    held = load_file(trained / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in held.values()) == matrices + 10 * 32


def test_matrices_are_as_precise_as_the_base_unless_asked_and_rows_as_trained(options):
    held = load_file(train(replace(options, steps=1, save_dtype="bfloat16")).out / "adapter_model.safetensors")
    assert {tensor.dtype for name, tensor in held.items() if "lora" in name} == {torch.bfloat16}
    assert {tensor.dtype for name, tensor in held.items() if "lora" not in name} == {torch.float32}


@pytest.mark.slow
def test_the_whole_model_is_written_when_asked(options, base, trained):
    out = train(replace(options, steps=4, merge=True)).out
    assert not (out / "adapter.json").exists()
    whole, merged = (
        rc.load_lm(out, packed=False).model.state_dict(),
        rc.load_lm(trained, packed=False).model.state_dict(),
    )
    for name, weight in load_file(base / "model.safetensors").items():
        torch.testing.assert_close(whole[name][: len(weight)], merged[name][: len(weight)], atol=1e-6, rtol=1e-5)
    assert rc.load_lm(out).reuse == LINK
    with pytest.raises(ConfigError, match="merge goes with lora_rank"):
        replace(options, lora_rank=0, merge=True)


def test_the_fingerprint_covers_the_matrices(base, trained, tmp_path):
    longer = shutil.copytree(trained, tmp_path / "longer")
    matrices = held_by(longer)
    name = next(name for name in matrices if "lora_A" in name)
    save_file({**matrices, name: matrices[name] * 1.5}, longer / "adapter_model.safetensors")
    assert len({rc.load_lm(where).fingerprint for where in (base, trained, longer)}) == 3
    assert rc.load_lm(trained).fingerprint == rc.load_lm(trained).fingerprint


def test_another_engine_cannot_have_it(trained, tmp_path):
    with pytest.raises(AdapterError, match="no directory holds this model's weights"):
        servable(str(trained), "", tmp_path)


# Going on


def held_by(out):
    return load_file(out / "adapter_model.safetensors")


def go_on(options, first, **changes):
    """Train by a step whose rate changes nothing, and return the directory, which has the initial weights."""
    again = replace(options, model=first, out=options.out.with_name("again"), steps=1, learning_rate=1e-12, **changes)
    return train(again).out


def test_training_goes_on_from_an_adapter_and_more_link_tokens_keep_the_rows_there(options, base, trained):
    again = go_on(options, trained, link_tokens=3)
    assert json.loads((again / "adapter.json").read_text())["base"]["name"] == str(base)
    before, after = held_by(trained), held_by(again)
    assert before.keys() == after.keys()
    spec, name = rc.load_lm(again).reuse, next(name for name in before if name.endswith("tokens_delta"))
    for matrix in before.keys() - {name}:
        torch.testing.assert_close(after[matrix], before[matrix], atol=1e-9, rtol=0)
    old = dict(zip(sorted(LINK.added_ids), before[name], strict=True))
    new = dict(zip(sorted(spec.added_ids), after[name], strict=True))
    for slot in range(4):
        for here, there in zip(spec.link_ids(slot), LINK.link_ids(slot), strict=False):
            torch.testing.assert_close(new[here], old[there], atol=1e-9, rtol=0)
    torch.testing.assert_close(new[spec.kv_end_id], old[LINK.kv_end_id], atol=1e-9, rtol=0)


def test_a_directory_that_holds_an_adapter_is_not_overwritten(options, trained):
    (shutil.copytree(trained, options.out) / "training_options.json").unlink()
    with pytest.raises(ConfigError, match="holds a trained model already"):
        train(replace(options, steps=1))


def test_another_rank_or_base_or_way_is_refused_by_name(options, base, trained, tmp_path):
    def refused(error, match, **changes):
        with pytest.raises(error, match=match):
            go_on(options, changes.pop("model", trained), **changes)

    refused(ConfigError, rf"lora_rank is 4 and {trained}.* has 3; train with lora_rank=3, or .*{base}", lora_rank=4)
    moved = shutil.copytree(trained, tmp_path / "moved")
    edit(moved, name=str(save_base(tmp_path / "other base", True)))
    config = json.loads((tmp_path / "other base" / "config.json").read_text())
    (tmp_path / "other base" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    refused(AdapterError, "moved was trained beside other weights than those of .*other base", model=moved)
    plain = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear")).save_pretrained(
        tmp_path / "of another tool"
    )
    refused(ConfigError, "train with merge, which writes the whole model", model=tmp_path / "of another tool")


# So many minutes


@pytest.mark.slow
def test_a_run_of_so_many_minutes_ends_with_an_adapter_and_a_rate_that_has_fallen(options, tmp_path, monkeypatch):
    """The clock advances by 10 s at each step."""
    options = replace(options, steps=1000, minutes=2)
    now, begun = [0.0], []
    monkeypatch.setattr("ragcache_train.run_files.time", SimpleNamespace(monotonic=lambda: now[0]))  # no other clock
    monkeypatch.setattr(
        "ragcache_train.trainer.ReuseTrainer.compute_loss", slowed(ReuseTrainer.compute_loss, now, begun)
    )
    report = train(options)
    lines = log_of(report.out)
    assert report.steps == len(lines) == len(begun) == 12
    assert lines[-1]["seconds"] == 120.0
    rates = [line["learning_rate"] / options.rate for line in lines]
    # A step's rate is that of the time at which the step before it ended: its warm-up (3 % of 120 s) is over by then.
    assert rates == pytest.approx([0.0, *(1 - (10 * n / 120 - 0.03) / 0.97 for n in range(1, 12))], abs=1e-6)
    assert rc.load_lm(report.out).reuse.link_tokens == 2
    again = train(replace(options, minutes=2.5, resume=True))
    assert (again.steps, len(begun)) == (15, 15)


def slowed(compute_loss, now, begun):
    def compute(self, *args, **kwargs):
        now[0] += 10
        begun.append(now[0])
        return compute_loss(self, *args, **kwargs)

    return compute


def test_rates_by_time_are_those_of_transformers_by_steps(options):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler("linear", optimizer, num_warmup_steps=10, num_training_steps=100)
    chosen = replace(options, warmup=0.1)
    for step in range(100):
        assert chosen.rate_share(step / 100) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        theirs.step()


# Bad input


def edit(adapter, **base):
    path = adapter / "adapter.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "base": {**found["base"], **base}}))


def refused(adapter, match):
    with pytest.raises(AdapterError, match=match):
        rc.load_lm(adapter)


def test_matrices_that_are_missing_or_too_many_or_not_finite_are_named(adapter):
    path = adapter / "adapter_model.safetensors"
    whole = load_file(path)
    name = next(name for name in whole if "layers.1" in name and "lora_A" in name)
    for broken, match in (
        ({n: t for n, t in whole.items() if n != name}, rf"{name.removesuffix('.weight')}.* is not there"),
        ({**whole, name.replace("layers.1", "layers.2"): whole[name].clone()}, "layers.2.* has no place in the base"),
        ({**whole, name: whole[name] * torch.inf}, "damaged, or of another base"),
        ({**whole, name: whole[name][:2]}, "damaged, or of another base"),
    ):
        save_file({n: t.contiguous() for n, t in broken.items()}, path)
        refused(adapter, match)


def test_a_missing_configuration_is_named(adapter):
    (adapter / "adapter_config.json").unlink()
    refused(adapter, "is missing or damaged")


def test_rows_of_ids_that_the_tokenizer_has_otherwise_are_named(adapter):
    path = adapter / "tokenizer.json"
    path.write_text(path.read_text().replace("<|link_2_1|>", "<|tool_call|>"))
    refused(adapter, r"id 260 is '<\|tool_call\|>' in its tokenizer and '<\|link_2_1\|>' in the one")
