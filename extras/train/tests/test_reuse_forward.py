"""The training forward pass equals plain transformers under the papers' mask in every family, and the engine on the
same prompt.
"""

from dataclasses import replace
from itertools import chain

import pytest
import reuse_oracle as oracle
import torch
from families import method_families, oracle_logits_of, oracle_model, random_prompt, save_tiny

import ragcache as rc
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.masked_pass import NAME, answer_logits, answer_loss, register
from ragcache_train.train_batches import Ask, EncodedRow, collate, lay_out

LINK = TrainedTokens("link", "isolated", 2, 8, 20, 60, 61)
MARKERS = {
    name: TrainedTokens("markers", doc_start_id=70, doc_end_id=71, positions=name)
    for name in ("reordered", "composite")
}
SPECS = {"link": LINK, "reposition": TrainedTokens("reposition"), **MARKERS}
BEHIND = {
    f"{name}, {recipe}": replace(SPECS[name], recipe=recipe)
    for name in ("link", "reposition")
    for recipe in ("prefix", "primer")
}
PRIMER = (130, 131, 132, 133, 134)
PROMPT = random_prompt(3)
QUESTIONS = [list(PROMPT.suffix_ids), [101, 102, 103], [104, 105, 106, 107]]
ANSWERS = [[110, 111, 2], [112, 2], [113, 114, 115, 2]]
ROW = EncodedRow(
    "qa",
    "",
    PROMPT.prefix_ids,
    PROMPT.chunk_ids,
    [Ask(question, answer) for question, answer in zip(QUESTIONS, ANSWERS, strict=True)],
    None,
    True,
)


def trainable(directory: str):
    register()
    model = rc.load_lm(directory).model
    model.set_attn_implementation(NAME)
    return model.requires_grad_(True).train()


def training_logits(model, batch, rope=None):
    """Return the logits of every labelled token, in order: [num_labels, vocab_size]."""
    with torch.no_grad():
        return answer_logits(model, model, batch, rope)


def oracle_training_logits(model):
    """Return the logits of each answer token by a separate forward pass, with each question alone after the context."""
    found = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        for given in range(len(answer)):
            tokens = oracle.apart(LINK, PROMPT.prefix_ids, PROMPT.chunk_ids, [[*question, *answer[:given]]])
            ids, positions = [token.id for token in tokens], [token.position for token in tokens]
            found.append(oracle_logits_of(model, ids, oracle.allowed(tokens), positions))
    return torch.stack(found)


@pytest.mark.parametrize("family", method_families(without="stablelm"))  # which is refused
def test_training_is_a_plain_forward_under_the_papers_mask(family, tmp_path):
    directory = save_tiny(family, str(tmp_path))
    other = ROW._replace(chunks=ROW.chunks[:2])  # a shorter row in the same batch
    batch = collate([lay_out(ROW, LINK, True), lay_out(other, LINK, True)])
    model, theirs = trainable(directory), oracle_training_logits(oracle_model(directory))
    torch.testing.assert_close(training_logits(model, batch)[: len(theirs)], theirs, atol=2e-4, rtol=2e-4)
    loss = answer_loss(model, model, collate([lay_out(ROW, LINK, True)]))
    expected = torch.nn.functional.cross_entropy(theirs, torch.tensor([*chain(*ANSWERS)]))
    torch.testing.assert_close(loss, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral"])
def test_training_sees_what_the_engine_will_see(family, tmp_path):
    directory = save_tiny(family, str(tmp_path))
    lm, model = rc.load_lm(directory), trainable(directory)
    row = ROW._replace(asks=[Ask(PROMPT.suffix_ids, [5])])  # one label: the first answer token
    for name, spec in {**SPECS, **BEHIND}.items():
        primer = PRIMER if spec.recipe == "primer" else ()
        ours = training_logits(model, collate([lay_out(row._replace(primer=primer), spec, True)]), lm.rope)[0]
        theirs = engine_logits(lm, spec, rc.Recipe(spec.recipe, primer=primer))
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4, msg=lambda m, n=name: n + m)
    full = rc.fuse(lm, PROMPT, method="full").next_logits
    whole = collate([lay_out(row, LINK, False)])
    torch.testing.assert_close(training_logits(model, whole)[0], full, atol=2e-4, rtol=2e-4)


def engine_logits(lm, spec: TrainedTokens, recipe: rc.Recipe):
    if spec.method == "link":
        # link_ids adds link tokens only: KV-START and KV-END are given here as part of prefix and suffix
        around = rc.Prompt([*PROMPT.prefix_ids, 60], PROMPT.chunk_ids, [61, *PROMPT.suffix_ids])
        links = [[20 + 2 * slot, 21 + 2 * slot] for slot in range(len(PROMPT.chunk_ids))]
        return rc.fuse(lm, around, "link", recipe=recipe, link_ids=links).next_logits
    ids = {"doc_start_id": 70, "doc_end_id": 71, "positions": spec.positions} if spec.method == "markers" else {}
    return rc.fuse(lm, PROMPT, spec.method, recipe=None if ids else recipe, **ids).next_logits


def test_recomputed_activations_change_nothing(tmp_path):
    model = trainable(save_tiny("gemma3", str(tmp_path)))
    batch = collate([lay_out(ROW, LINK, True)])
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        answer_loss(model, model, batch).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for before, after in zip(*gradients, strict=True):
        torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-5)


def test_a_model_that_drops_its_masks_is_refused(tmp_path):
    """StableLM's layer does not pass further arguments on to its attention."""
    with pytest.raises(rc.UnsupportedModelError, match="StableLmAttention does not get the masks"):
        training_logits(trainable(save_tiny("stablelm", str(tmp_path))), collate([lay_out(ROW, LINK, True)]))
