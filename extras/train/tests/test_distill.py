"""Distillation: what the loss is, against plain transformers; whole runs; what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from covering import covering
from families import masks_of, oracle_model, random_prompt, save_tiny
from run_options import run_options
from safetensors.torch import load_file
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.distill import Distillation
from ragcache_train.masked_pass import NAME, answer_logits, register
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
    return Pair(lay_out(row, spec, True), lay_out(row, None, False))


def written_out(recipe, spec, whole):
    """The student's sequence, token by token, with a copy of prefix and primer in front of every passage.

    Each token is (id, position, passage or None, whether it is such a copy). Positions are all moved on by as much as
    the copies before the first passage would otherwise stand below 0.
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
    """Logits and hidden states of the last tokens but one, by plain transformers under an explicit mask."""
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


@pytest.mark.parametrize(("family", "recipe", "spec"), [
    (family, recipe, spec)
    for (family, recipe), spec in [
        (pair, spec) for pair in covering(["llama", "gemma3", "phi3", "qwen3"], RECIPES) for spec in ("link", "none")
    ]
])
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
            together = [(id, at, None, False) for at, id in enumerate([*PREFIX, *sum(CHUNKS, []), *whole])]
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
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-4 * scale + 1e-6, rtol=1e-3, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", ["reposition", "link"])
def test_training_reads_as_the_engine_does(method, recipe, tmp_path):
    lm = rc.load_lm(save_tiny("llama", str(tmp_path)))
    spec = replace(LINKS if method == "link" else TrainedTokens("reposition"), recipe=recipe)
    prompt, more = PROMPT, {}
    if method == "link":
        prompt = rc.Prompt([*PREFIX, 60], CHUNKS, [61, *PROMPT.suffix_ids])
        more = {"link_ids": [[20 + 2 * slot, 21 + 2 * slot] for slot in range(len(CHUNKS))]}
    used = rc.Recipe(recipe, primer=PRIMER) if recipe == "primer" else recipe
    engine = rc.fuse(lm, prompt, method=method, recipe=used, **more).next_logits
    student = loaded(tmp_path)
    batch = collate([lay_out(row_for(recipe)._replace(asks=[Ask(PROMPT.suffix_ids, [5])]), spec, True)])
    with torch.no_grad():
        ours = answer_logits(student.model, student.model, batch, student.rope)[0]
    torch.testing.assert_close(ours, engine, atol=2e-4, rtol=2e-4)


def test_one_passage_behind_its_prefix_has_no_loss(tmp_path):
    directory = save_tiny("llama", str(tmp_path))
    student, teacher = loaded(directory), loaded(directory)
    distill = Distillation(teacher.model, student.rope, 0.5, False)
    alone = ROW._replace(chunks=CHUNKS[:1])
    for recipe in RECIPES:
        spec = TrainedTokens("reposition", recipe)
        distill(student.model, student.model, collate_pairs([pair_of(row_for(recipe, alone), spec)]))
        found = distill.take()
        assert (found["kl"] < 1e-6 and found["hidden"] < 1e-8) is (recipe == "prefix"), (recipe, found)
    assert distill.take() == {}
