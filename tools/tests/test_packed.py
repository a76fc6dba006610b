"""The packed forward pass equals the plain forward pass, with each question alone after its context."""

import random

import pytest
import torch
from kit.makers import made_by
from torch.nn import functional

from tools.mini.base import Options, build_model
from tools.mini.batches import IGNORED, BatchMaker
from tools.mini.curriculum import STAGES
from tools.mini.packed import packed_scores
from tools.mini.tokenizer import build_tokenizer

tokenizer = made_by(build_tokenizer)


@pytest.fixture(scope="module")
def model(tokenizer):
    options = Options(out="", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2)
    return build_model(options, tokenizer.get_vocab_size())


@pytest.fixture(scope="module", params=["copy", "two hops"])
def batch(request, tokenizer):
    stage = next(stage for stage in STAGES if stage.name == request.param)
    return BatchMaker(tokenizer, random.Random(5)).draw(stage)


@torch.no_grad()
def test_loss_and_right_answers_are_those_of_the_plain_prompts(model, batch):
    scores = packed_scores(model, batch)
    losses = []
    for row in range(batch.question_ids.shape[0]):
        context = batch.context_ids[row, : batch.context_lengths[row]]
        for question in range(batch.question_ids.shape[1]):
            ids, labels = batch.question_ids[row, question], batch.labels[row, question]
            logits = model(torch.cat([context, ids])[None]).logits[0, len(context) :]
            kept = labels != IGNORED
            losses.append(functional.cross_entropy(logits[kept], labels[kept], reduction="none"))
            assert scores.right[row, question] == (logits[kept].argmax(-1) == labels[kept]).all()
    torch.testing.assert_close(scores.loss, torch.cat(losses).mean(), atol=2e-5, rtol=1e-4)


def test_labels_are_the_answer_and_its_end(tokenizer):
    maker = BatchMaker(tokenizer, random.Random(3))
    batch = maker.draw(STAGES[-1])
    for row in range(batch.labels.shape[0]):
        for question in range(batch.labels.shape[1]):
            labels = batch.labels[row, question]
            answer = labels[labels != IGNORED]
            before = batch.question_ids[row, question, : int((labels != IGNORED).nonzero().min()) + 1]
            assert answer[-1] == tokenizer.token_to_id("<|eos|>")
            text = tokenizer.decode(before.tolist())
            assert text.startswith("Question: ")
            assert text.endswith("?\nAnswer:")


def test_an_untrained_model_copies_by_match(tokenizer):
    """This is the purpose of the initial weights: the token after an earlier copy of the current token is likelier than
    by chance.
    """
    model = build_model(Options(out=""), tokenizer.get_vocab_size())
    with torch.no_grad():
        loss = packed_scores(model, BatchMaker(tokenizer, random.Random(1)).draw(STAGES[0])).loss
    assert loss < torch.log(torch.tensor(float(tokenizer.get_vocab_size()))) - 0.1
