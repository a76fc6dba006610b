"""A whole run: it learns, is saved as a model that the engine knows, and continues after an interruption with the same
results.
"""

import json
from dataclasses import replace

import pytest
import torch
from run_options import (
    CHAT_LINE,
    INSTRUCTION_LINE,
    QA_LINES,
    engine_logits,
    log_of,
    run_options,
    training_row,
)
from safetensors.torch import load_file

import ragcache as rc
from ragcache.errors import ConfigError, ModelNotFoundError
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.masked_pass import NAME, answer_logits
from ragcache_train.train_batches import collate, lay_out
from ragcache_train.trainer import train

LINES = [
    *QA_LINES,
    CHAT_LINE,
    {"type": "summary", "text": "A long text. " * 12, "summary": "Long."},
    INSTRUCTION_LINE,
    {"type": "text", "text": "Just some words."},
]


def options_of(base, folder):
    return run_options(base, folder, LINES, learning_rate=3e-3)


@pytest.fixture
def options(base, tmp_path):
    return options_of(base, tmp_path)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """Return the directory of a model after two steps of training with the method `link`."""
    return train(replace(options_of(base, tmp_path_factory.mktemp("trained")), steps=2)).out


def weights(out):
    return load_file(out / "model.safetensors")


def as_trained(out, apart: bool = True) -> torch.Tensor:
    """Return the logits of the first answer token by the training forward pass over the same prompt."""
    lm = rc.load_lm(out)
    model = lm.model
    batch = collate([lay_out(training_row(lm.tokenizer), TrainedTokens.of(model.config), apart)])
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        return answer_logits(model, model, batch)[0]


def test_link_training_learns_and_the_engine_computes_what_was_trained(options):
    report = train(replace(options, steps=30))
    losses = [line["loss"] for line in log_of(report.out)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert report.steps == 30
    assert report.rows == len(LINES)
    assert not report.bad
    lm = rc.load_lm(report.out)
    assert lm.reuse == TrainedTokens("link", "isolated", 2, 4, 258, 266, 267)
    assert lm.model.get_input_embeddings().weight.shape[0] == lm.vocab_size >= 268
    torch.testing.assert_close(engine_logits(report.out, "link"), as_trained(report.out), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(engine_logits(report.out, "full"), as_trained(report.out, False), atol=2e-4, rtol=2e-4)


def test_every_weight_is_trained_and_the_seed_decides(options, trained, tmp_path):
    again = train(replace(options, steps=2, out=tmp_path / "again"))
    other = train(replace(options, steps=2, out=tmp_path / "other", seed=5))
    start = load_file(options.model / "model.safetensors")
    for name, tensor in weights(trained).items():
        assert torch.equal(tensor, weights(again.out)[name]), name
        assert not torch.equal(tensor[: start[name].shape[0]], start[name]), name
    assert any(not torch.equal(t, weights(other.out)[name]) for name, t in weights(trained).items())


def test_lora_is_merged_and_trains_the_new_rows(options, tmp_path):
    report = train(replace(options, steps=4, lora_rank=2, merge=True))
    start, end = load_file(options.model / "model.safetensors"), weights(report.out)
    name = "model.embed_tokens.weight"
    assert torch.equal(end[name][:258], start[name])  # words stay
    projection = "model.layers.0.self_attn.q_proj.weight"
    change = end[projection] - start[projection]
    assert int(torch.linalg.matrix_rank(change, atol=1e-6)) == 2
    assert not any("lora" in key for key in end)
    few = train(replace(options, steps=1, lora_rank=2, merge=True, out=tmp_path / "few")).out
    used = rc.load_lm(few).reuse.link_ids(0)
    assert not torch.equal(weights(few)[name][used], end[name][used])


def test_weights_are_saved_as_precise_as_they_came_unless_asked(options, trained, tmp_path):
    assert {t.dtype for t in weights(trained).values()} == {torch.float32}
    halved = train(replace(options, steps=1, save_dtype="bfloat16", precision="bfloat16", out=tmp_path / "half"))
    assert {t.dtype for t in weights(halved.out).values()} == {torch.bfloat16}
    assert json.loads((halved.out / "config.json").read_text())["use_cache"] is True


def test_lines_that_cannot_be_used_are_named_and_left_out(options, caplog):
    with open(options.data[0], "a", encoding="utf-8") as file:
        file.write('{"type": "qa"}\n' + json.dumps({**LINES[1], "passages": ["x" * 600]}) + "\n")
    report = train(replace(options, steps=1))
    assert [line.where for line in report.bad] == [f"{options.data[0]}:7", f"{options.data[0]}:8"]
    assert "longest sequence is 512" in report.bad[1].reason
    assert "rows.jsonl:7" in caplog.text


def refused(options, match, **changes):
    with pytest.raises(ConfigError, match=match):
        train(replace(options, steps=1, **changes))


def test_what_cannot_be_trained_is_refused_by_name(options, tmp_path):
    refused(options, r"rows.jsonl:1 has 3 passages.*link tokens for 2.*link_slots=3", link_slots=2)
    refused(options, "model takes 512", max_tokens=600)
    refused(options, "an answer has", max_tokens=4)
    refused(options, "one of link, markers", reuse="glue")
    refused(options, "names poem", mixture={"poem": 1.0})
    refused(options, "no training run to resume", resume=True)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    refused(options, "no usable line", data=(empty,))
    with pytest.raises(ModelNotFoundError):
        train(replace(options, model=tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"epochs": 0.0},
        {"minutes": 0},
        {"lora_rank": -1},
        {"lora_alpha": 0.0},
        {"warmup": 2.0},
        {"learning_rate": 0.0},
        {"accumulate": 0},
        {"precision": "float8"},
        {"save_dtype": "int8"},
        {"max_tokens": 1},
        {"separate_share": 2.0},
        {"batch_tokens": 0},
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_read(options, changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(options, model="nowhere", **changes)


def test_a_run_is_not_overwritten_nor_resumed_with_other_options(base, trained):
    options = options_of(base, trained.parent)
    refused(options, "holds a trained model already")
    refused(options, r"link_tokens=2 and now it is 3", link_tokens=3, resume=True)
