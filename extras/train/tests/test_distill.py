"""Distillation: the loss against plain transformers, whole runs, and refused options."""

import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from covering import covering, few
from families import masks_of, oracle_model, random_prompt, save_tiny
from run_options import INSTRUCTION_LINE, QA_LINES, log_of, resumed, run_options, timeless
from safetensors.torch import load_file
from torch.nn.attention.flex_attention import flex_attention

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.distill import Distillation
from ragcache_train.kept_logits import MOST, KeptLogits
from ragcache_train.masked_pass import BLOCK, NAME, Visibility, answer_logits, register
from ragcache_train.train_batches import Ask, EncodedRow, Pair, collate, collate_pairs, lay_out, vary
from ragcache_train.trainer import train

PROMPT = random_prompt(3)
PREFIX, CHUNKS = list(PROMPT.prefix_ids), [list(chunk) for chunk in PROMPT.chunk_ids]
ASKS = [Ask(list(PROMPT.suffix_ids), [110, 111, 2]), Ask([101, 102, 103], [112, 2])]
PRIMER = (130, 131, 132, 133, 134)
ROW = EncodedRow("qa", "", PREFIX, CHUNKS, [ask.learned for ask in ASKS], None, True)
RECIPES = ("isolated", "prefix", "primer")
LINKS = TrainedTokens("link", "isolated", 2, 4, 20, 60, 61)


def loaded(directory):
    register()
    lm = rc.load_lm(directory, packed=False)
    lm.model.set_attn_implementation(NAME)
    return lm


def row_for(recipe, row=ROW):
    return row._replace(primer=PRIMER if recipe == "primer" else ())


def pair_of(row, spec):
    return Pair(lay_out(row, spec, True), lay_out(row, spec, False))


def written_out(recipe, spec, whole):
    """Return the student's sequence token by token, with a copy of prefix and primer before every passage.

    Each token is (id, position, passage or None, whether it is such a copy). All positions are moved by as much as the
    copies before the first passage would otherwise be below 0.
    """
    start = [60] if spec.link_tokens else []
    head = [*PREFIX, *start]
    copied = {"isolated": [], "prefix": head, "primer": [*head, *PRIMER]}[recipe]
    tokens = [(id, place, None, False) for place, id in enumerate(head)]
    place = len(head)
    for number, chunk in enumerate(CHUNKS):
        tokens += [(id, place - len(copied) + at, number, True) for at, id in enumerate(copied)]
        tokens += [(id, place + at, number, False) for at, id in enumerate(chunk)]
        place += len(chunk)
        links = [20 + 2 * number, 21 + 2 * number] if spec.link_tokens else []
        tokens += [(id, place + at, None, False) for at, id in enumerate(links)]
        place += len(links)
    end = [61] if spec.link_tokens else []
    tokens += [(id, place + at, None, False) for at, id in enumerate([*end, *whole])]
    return [(id, place + len(PRIMER), passage, copy) for id, place, passage, copy in tokens]


def oracle_states(model, tokens, count):
    """Return logits and hidden states of the last `count` tokens without the very last, by plain transformers under an
    explicit mask.
    """
    passages = [passage for _, _, passage, _ in tokens]
    allowed = torch.tensor(
        [
            [
                key <= query
                and (passages[query] == passages[key] if passages[query] is not None else not tokens[key][3])
                for key in range(len(tokens))
            ]
            for query in range(len(tokens))
        ]
    )
    positions = [position for _, position, _, _ in tokens]
    out = model(
        input_ids=torch.tensor([[id for id, _, _, _ in tokens]]),
        position_ids=torch.tensor([positions]),
        attention_mask=masks_of(model, allowed, positions),
        output_hidden_states=True,
    )
    return out.logits[0, -count:-1], [state[0, -count:-1] for state in out.hidden_states[1:]]


@pytest.mark.parametrize("spec", ["link", "none"])
@pytest.mark.parametrize(("family", "recipe"), covering(["llama", "gemma3", "phi3", "qwen3"], RECIPES))
def test_loss_and_gradient_equal_plain_transformers(family, recipe, spec, tmp_path):
    directory = save_tiny(family, str(tmp_path))
    spec = replace(LINKS if spec == "link" else TrainedTokens("reposition"), recipe=recipe)
    student, teacher, plain = loaded(directory), loaded(directory), oracle_model(directory).requires_grad_(True)
    distill = Distillation(teacher.model, student.rope, 0.5, False)
    student.model.requires_grad_(True)
    row = row_for(recipe)
    other = row._replace(chunks=row.chunks[:1], asks=row.asks[:1])  # another row in the same batch
    loss = distill(student.model, student.model, collate_pairs([pair_of(row, spec), pair_of(other, spec)]))
    short = distill(student.model, student.model, collate_pairs([pair_of(other, spec)]))
    labels, rest = (sum(len(ask.answer) for ask in one.asks) for one in (row, other))
    loss = (loss * (labels + rest) - short * rest) / labels
    loss.backward()
    total = 0.0
    for ask in ASKS:
        whole = [*ask.suffix, *ask.answer]
        with torch.no_grad():
            together = [(id, at, None, False) for at, id in enumerate([*PREFIX, *chain(*CHUNKS), *whole])]
            truth, aims = oracle_states(plain, together, len(whole))
        logits, states = oracle_states(plain, written_out(recipe, spec, whole), len(whole))
        kl = (truth.softmax(-1) * (truth.log_softmax(-1) - logits.log_softmax(-1))).sum()
        errors = [(((a - b) ** 2).sum(-1) / (b**2).sum(-1)).sum() for a, b in zip(states, aims, strict=True)]
        total = total + kl + 0.5 * sum(errors) / len(errors)
    (total / labels).backward()
    torch.testing.assert_close(loss.detach(), (total / labels).detach(), atol=1e-5, rtol=1e-4)
    assert float(loss.detach()) > 1e-4, "reading apart is another thing"
    for (name, ours), theirs in zip(student.model.named_parameters(), plain.parameters(), strict=True):
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(
            ours.grad, theirs.grad, atol=2e-4 * scale + 1e-6, rtol=1e-3, msg=lambda m, n=name: n + m
        )


def losses_of_tokens(distill, lm, batch):
    """Return the KL of every labelled token by plain means, now and under the untrained weights, and the
    log-probabilities of the teacher and of the student.
    """
    truth = answer_logits(distill.teacher, distill.teacher, batch["teacher"]).double().log_softmax(-1)
    found = [
        answer_logits(model, model, batch, lm.rope).double().log_softmax(-1) for model in (lm.model, distill.teacher)
    ]
    return [(truth.exp() * (truth - own)).sum(-1) for own in found], truth, found[0]


@pytest.fixture
def shaken(tmp_path):
    """Return a student whose weights differ from its teacher's, and a batch of two rows."""
    directory = save_tiny("llama", str(tmp_path))
    student, teacher = loaded(directory), loaded(directory)
    with torch.no_grad():
        for parameter in student.model.parameters():
            parameter.mul_(1.1)
    spec = TrainedTokens("reposition", "prefix")
    rows = [row_for("prefix"), row_for("prefix")._replace(chunks=CHUNKS[:2], asks=ROW.asks[:1])]
    return student, teacher, collate_pairs([pair_of(row, spec) for row in rows])


@torch.no_grad()
def test_damaged_tokens_weigh_more(shaken):
    student, teacher, batch = shaken
    distill = Distillation(teacher.model, student.rope, 0.0, False, damage_weight=3.0)
    (own, damage), _, _ = losses_of_tokens(distill, student, batch)
    weights = (1 + 3 * damage / damage.mean()) / 4
    loss = distill(student.model, student.model, batch)
    torch.testing.assert_close(loss.double(), (own * weights).mean(), atol=1e-6, rtol=1e-4)
    assert abs(float(loss) - float(own.mean())) > 1e-4
    assert distill.take()["kl"] == pytest.approx(float(own.mean()), rel=1e-4)  # the log shows the plain KL
    assert distill.take() == {}


@torch.no_grad()
def test_kept_logits_replace_the_teachers_pass(shaken, tmp_path, monkeypatch):
    student, teacher, batch = shaken
    folder = tmp_path / "logits"
    distill = Distillation(teacher.model, student.rope, 0.0, False, kept=KeptLogits(folder, "digest"))
    _, truth, own = losses_of_tokens(distill, student, batch)
    shares, ids = truth.topk(MOST)
    rest, own_rest = (1 - shares.exp().sum(-1)).clamp_min(1e-6), (1 - own.gather(-1, ids).exp().sum(-1)).clamp_min(1e-6)
    kl = (shares.exp() * (shares - own.gather(-1, ids))).sum(-1) + rest * (rest / own_rest).log()
    first = distill(student.model, student.model, batch)
    torch.testing.assert_close(first.double(), kl.mean(), atol=1e-5, rtol=1e-3)
    files = sorted(folder.rglob("*.safetensors"))
    assert len(files) == 2  # a file for each row

    def refuse(*args, **kwargs):
        raise AssertionError("the teacher ran")

    again = Distillation(teacher.model, student.rope, 0.0, False, kept=KeptLogits(folder, "digest"))
    with monkeypatch.context() as patch:
        patch.setattr(teacher.model, "forward", refuse)
        torch.testing.assert_close(again(student.model, student.model, batch), first)
        files[0].write_bytes(files[0].read_bytes()[:-40])
        with pytest.raises(AssertionError, match="the teacher ran"):
            again(student.model, student.model, batch)
    torch.testing.assert_close(again(student.model, student.model, batch), first)  # and written anew
    other = Distillation(teacher.model, student.rope, 0.0, False, kept=KeptLogits(folder, "another"))
    other(student.model, student.model, batch)
    assert len(sorted(folder.rglob("*.safetensors"))) == 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_moves_passages_as_dense_attention_does(tmp_path, monkeypatch):
    def uncompiled(module, query, key, value, mask, scaling, softcap, s_aux):
        return flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2), None

    student = loaded(save_tiny("gemma3", str(tmp_path)))
    monkeypatch.setattr("ragcache_train.masked_pass.flex_attention_forward", uncompiled)
    batch = collate([lay_out(row_for("primer"), replace(LINKS, recipe="primer"), True)], multiple=BLOCK)
    with torch.no_grad():
        dense = answer_logits(student.model, student.model, batch, student.rope)
        monkeypatch.setattr(Visibility, "for_attention", lambda self, window, dtype: self.blocks(window))
        flex = answer_logits(student.model, student.model, batch, student.rope)
    torch.testing.assert_close(flex, dense, atol=2e-4, rtol=2e-4)


LINES = [*QA_LINES, {"type": "text", "text": "Just some words that go on and on. " * 5}, INSTRUCTION_LINE]


@pytest.fixture
def options(base, tmp_path):
    made = run_options(base, tmp_path, LINES, learning_rate=3e-3, objective="distill", recipe="prefix", warmup=0.1)
    return replace(made, separate_share=0.8, segment_tokens=20)


def test_distillation_learns_and_is_evaluated(options, base, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps(LINES[0]) + "\n", encoding="utf-8")
    report = train(replace(options, steps=60, evaluate=held, evaluate_every=20, link_tokens=1))
    lines = log_of(report.out)
    assert [line["step"] for line in lines] == list(range(1, 61))
    first, last = ([line["kl"] for line in part] for part in (lines[:10], lines[-10:]))
    assert sum(last) < 0.6 * sum(first)
    assert all(line["hidden"] > 0 and line["tokens_per_s"] > 0 for line in lines)
    assert all(line["loss"] == pytest.approx(line["kl"] + 0.5 * line["hidden"], abs=2e-4) for line in lines)
    found = log_of(report.out, "evaluation.jsonl")
    assert [line["step"] for line in found] == [0, 20, 40, 60]
    assert [line["tokens"] for line in found] == [0, *(lines[step - 1]["tokens"] for step in (20, 40, 60))]
    assert found[-1]["kl"] < 0.6 * found[0]["kl"]
    assert found[0]["kl_together"] < 1e-6 < found[-1]["kl_together"]
    lm = rc.load_lm(report.out)
    assert (lm.reuse.method, lm.reuse.recipe, lm.reuse.link_tokens) == ("link", "prefix", 1)
    start, end = (load_file(path / "model.safetensors") for path in (base, report.out))
    words = "model.embed_tokens.weight"
    assert torch.equal(end[words][: len(start[words])], start[words]), "words and head stay the teacher's"
    assert not torch.equal(end["model.layers.0.mlp.up_proj.weight"], start["model.layers.0.mlp.up_proj.weight"])


def test_links_have_their_own_rate(options, tmp_path):
    ends = [
        load_file(train(replace(options, steps=2, link_rate=rate, out=tmp_path / str(rate))).out / "model.safetensors")
        for rate in (1e-9, 1e-2)
    ]
    lm = rc.load_lm(tmp_path / "0.01")
    ids, words = lm.reuse.link_ids(0), "model.embed_tokens.weight"
    assert (ends[1][words][ids] - ends[0][words][ids]).abs().max() > 5e-3


WAYS = {
    "all": {"link_tokens": 0, "recipe": "isolated"},
    "lora": {"lora_rank": 2},
    "merged lora": {"lora_rank": 2, "merge": True},
    "accumulate": {"accumulate": 2},
}


@pytest.mark.parametrize("way", few(["all", "lora"], ["merged lora", "accumulate"]))
def test_resumed_run_equals_uninterrupted_one(options, tmp_path, way):
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps(LINES[1]) + "\n", encoding="utf-8")
    options = replace(options, steps=7, save_every=2, keep_checkpoints=3, evaluate=held, evaluate_every=3, **WAYS[way])
    whole, (report, after_stop) = train(options), resumed(options, tmp_path / "stopped", 5)
    assert after_stop == [5, 6, 7], "goes on from the checkpoint of step 4"
    name = "adapter_model.safetensors" if way == "lora" else "model.safetensors"
    before, after = (load_file(one.out / name) for one in (whole, report))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    for file in ("training_log.jsonl", "evaluation.jsonl"):
        assert timeless(log_of(whole.out, file)) == timeless(log_of(report.out, file))
    lm = rc.load_lm(report.out)
    assert lm.reuse.recipe == options.recipe


def test_half_written_checkpoints_are_passed_over(options, tmp_path, caplog):
    whole = train(replace(options, steps=6, save_every=2, keep_checkpoints=3, link_tokens=0))
    before = load_file(whole.out / "model.safetensors")
    last, middle = (whole.out / "checkpoints" / f"checkpoint-{step}" for step in (6, 4))
    (last / "trainer_state.json").unlink()
    weights = middle / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    resumed = replace(options, steps=6, save_every=2, keep_checkpoints=3, link_tokens=0, resume=True)
    train(resumed)
    assert "checkpoint-6 is not whole" in caplog.text
    assert "checkpoint-4 is not whole" in caplog.text
    after = load_file(whole.out / "model.safetensors")
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    for path in (whole.out / "checkpoints").iterdir():
        (path / "optimizer.pt").write_bytes(b"PK")
    with pytest.raises(ConfigError, match="delete that directory to start anew"):
        train(resumed)


def test_rows_vary_in_number_order_and_length():
    row = ROW._replace(chunks=[list(range(start, start + 20)) for start in (100, 200, 300, 400)], asks=ASKS)
    drawn = [vary(row, seed, 3) for seed in range(60)]
    assert {len(one.chunks) for one in drawn} == {2, 3}
    assert len({tuple(chunk[0] for chunk in one.chunks) for one in drawn}) > 10
    for chunk in (chunk for one in drawn for chunk in one.chunks):
        whole = next(own for own in row.chunks if own[0] == chunk[0]) if len(chunk) > 1 else chunk
        assert chunk == [*whole[: len(chunk) - 1], whole[-1]]
    lengths = [len(chunk) for one in drawn for chunk in one.chunks]
    assert min(lengths) >= 5
    assert 0.3 < lengths.count(20) / len(lengths) < 0.7
    assert vary(row, 1, 3) == vary(row, 1, 3)
    assert vary(row._replace(shuffle=False), 1, 3) == row._replace(shuffle=False)


def test_unusable_input_is_refused_by_name(options, base, tmp_path):
    def refused(match, **changes):
        with pytest.raises(ConfigError, match=match):
            train(replace(options, steps=1, **changes))

    for family, match in (("qwen3", "of family 'qwen3' and .* of 'llama'"), ("llama", "another vocabulary")):
        other = save_tiny(family, str(tmp_path / family))
        rc.load_lm(base).tokenizer.save_pretrained(other)
        if family == "llama":
            held = json.loads((tmp_path / family / "tokenizer.json").read_text())
            held["model"]["vocab"] = {k: v for k, v in held["model"]["vocab"].items() if v < 200}
            (tmp_path / family / "tokenizer.json").write_text(json.dumps(held))
        refused(match, teacher=other)
    refused("store goes with objective='distill'", objective="labels", store="kb")
    refused("rows is 0", rows=0)
    refused("teacher goes with objective='distill'", objective="labels", teacher=base)
    refused("hidden_weight is -1", hidden_weight=-1.0)
    refused("link_rate is 0", link_rate=0.0)
    refused("damage_weight is -1", damage_weight=-1.0)
    refused("keep_logits keeps no hidden states", keep_logits=tmp_path / "kept")
    (tmp_path / "file").write_text("", encoding="utf-8")
    refused("cannot be kept in .*file", keep_logits=tmp_path / "file", hidden_weight=0.0)
    refused("keep_logits goes with objective='distill'", objective="labels", keep_logits=tmp_path / "kept")
    refused("recipe 'alone' is unknown", recipe="alone")
    only = tmp_path / "only.jsonl"
    only.write_text(json.dumps(INSTRUCTION_LINE) + "\n", encoding="utf-8")
    refused("no passages to read apart", data=(only,))
    only.write_text(json.dumps(LINES[0]) + "\n", encoding="utf-8")
    refused("no line of the data fits.*longest sequence is 30", data=(only,), max_tokens=30)
    first = train(replace(options, steps=1, link_tokens=1)).out
    for changes, match in (
        ({"recipe": "primer"}, "recipe='prefix' and now"),
        ({"link_tokens": 2}, "link_tokens=1 and"),
    ):
        refused(match, **{"link_tokens": 1, "resume": True, **changes})
    refused("was trained for reuse already.*as teacher", model=first, link_tokens=1, out=tmp_path / "on")
    report = train(replace(options, steps=1, model=first, link_tokens=1, teacher=base, out=tmp_path / "on"))
    assert log_of(report.out)[0]["kl"] > 0
