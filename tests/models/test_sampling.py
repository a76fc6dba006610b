"""Penalties, cuts and log-probabilities against transformers' own processors and the formulas of OpenAI's docs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import random_prompt, tiny
from transformers import RepetitionPenaltyLogitsProcessor

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampler, Sampling

PROMPT = random_prompt(1)
CPU = torch.device("cpu")


@pytest.fixture
def llama():
    return tiny("llama")


def said(lm, sampling, **more):
    fused = rc.fuse(lm, PROMPT, method="full")
    logits, position = fused.next_logits, fused.next_position
    return list(decode(lm, fused.cache, logits, position, sampling, prompt_ids=PROMPT.ids, **more))


def plain_logits(model, ids):
    """Logits for the token behind each of `ids`."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"presence_penalty": -0.2, "repetition_penalty": 1.3, "logit_bias": {7: 0.3, 11: -5.0}},
]


@pytest.mark.parametrize("penalties", PENALTIES)
def test_penalties_are_the_published_formulas(llama, penalties):
    """One greedy step after the other: transformers' processor for repetition (CTRL), and mu[j] - c[j] * frequency -
    (c[j] > 0) * presence, as OpenAI states it, counted with NumPy over the answer alone."""
    lm, oracle = llama
    by = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, **penalties}
    repetition = RepetitionPenaltyLogitsProcessor(by["repetition_penalty"])
    expected: list[int] = []
    for _ in range(24):
        ids = [*PROMPT.ids, *expected]
        logits = plain_logits(oracle, ids)[-1:]
        for id, bias in by["logit_bias"].items():
            logits[0, id] += bias
        scores = repetition(torch.tensor([ids]), logits)[0].numpy()
        counts = np.bincount(np.array(expected, dtype=int), minlength=len(scores))
        scores = scores - counts * by["frequency_penalty"] - (counts > 0) * by["presence_penalty"]
        expected.append(int(scores.argmax()))
    assert said(lm, Sampling(24, **penalties)) == expected
    assert said(lm, Sampling(24)) != expected


def test_min_p_leaves_out_what_is_less_likely_than_its_share_of_the_likeliest():
    logits = torch.tensor([2.0, 1.9, 1.0, 0.5, -3.0])
    shares = np.exp(logits.numpy() - logits.numpy().max())
    draw = Sampler(Sampling(temperature=1.0, min_p=0.3, seed=0), CPU)
    drawn = torch.bincount(torch.tensor([draw(logits) for _ in range(3000)]), minlength=5) / 3000
    expected = np.where(shares >= 0.3, shares, 0)
    np.testing.assert_allclose(drawn.numpy(), expected / expected.sum(), atol=0.03)
    assert (drawn.numpy() > 0).tolist() == (shares >= 0.3).tolist()


def test_log_probabilities_are_the_models_own(llama):
    """Whatever the temperature and the penalties: a plain forward's log-softmax."""
    lm, oracle = llama
    scores: list = []
    sampling = Sampling(9, temperature=1.5, seed=2, top_k=5, presence_penalty=1.0, logprobs=3)
    ids = said(lm, sampling, scores=scores)
    right = plain_logits(oracle, [*PROMPT.ids, *ids])[PROMPT.num_tokens - 1 : -1].log_softmax(-1)
    assert len(scores) == len(ids)
    for row, id, one in zip(right, ids, scores, strict=True):
        assert one.logprob == pytest.approx(float(row[id]), abs=1e-4)
        best = row.topk(3)
        assert [near for near, _ in one.top] == best.indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(llama):
    free = said(llama[0], Sampling(20))
    stop = free[5]
    assert said(llama[0], Sampling(20, stop_token_ids=(stop,))) == free[: free.index(stop)]


@pytest.mark.parametrize(
    "bad",
    [
        {"min_p": 1.5},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"repetition_penalty": 0.0},
        {"logit_bias": {3: float("nan")}},
        {"logprobs": 21},
    ],
)
def test_bad_sampling_is_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("wrong", [{"logit_bias": {-1: 1.0}}, {"stop_token_ids": (10**6,)}])
def test_ids_that_the_model_does_not_have_are_named(wrong):
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} names token id .* tiny has ids 0 to 99"):
        Sampling(**wrong).check_ids(100, "tiny")


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-38, 1e-40])
def test_a_temperature_near_zero_is_greedy(llama, temperature):
    """Logits divided by it overflow; the limit is the likeliest token."""
    cold = Sampling(max_tokens=6, temperature=temperature, seed=1)
    assert said(llama[0], cold) == said(llama[0], Sampling(max_tokens=6))
