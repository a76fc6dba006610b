"""Choosing tokens, stop strings and streaming, against transformers' own code, plain strings and published formulas."""

import threading

import numpy as np
import pytest
import torch
from families import random_prompt, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError
from ragcache.models.generate import Detokenizer, decode
from ragcache.models.sampler import Sampler, Sampling

PROMPT = random_prompt(1)


@pytest.fixture
def llama():
    return tiny("llama")


def steps_of(lm, sampling, prompt=PROMPT, **more):
    fused = rc.fuse(lm, prompt, method="full")
    return decode(lm, fused.cache, fused.next_logits, fused.next_position, sampling, prompt_ids=prompt.ids, **more)


def said(*given, **more):
    return list(steps_of(*given, **more))


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Every byte a token, so that one character may take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_greedy_equals_generate(llama):
    lm, oracle = llama
    ids = torch.tensor([PROMPT.ids])
    expected = oracle.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert said(lm, Sampling(max_tokens=40)) == expected[0, PROMPT.num_tokens :].tolist()


def test_an_end_ends_the_answer_and_is_not_part_of_it(llama):
    lm, free = llama[0], said(llama[0], Sampling(20))
    end = free[5]
    assert said(lm, Sampling(20), eos_ids=(end,)) == free[: free.index(end)]
    assert said(lm, Sampling(20, stop_token_ids=(end,))) == free[: free.index(end)]


def test_decoding_stops_at_the_last_position(llama):
    lm, _ = llama
    prompt = rc.Prompt([], [[5] * 505], [6])
    assert len(said(lm, Sampling(max_tokens=50), prompt)) == lm.max_positions - prompt.num_tokens


def test_cancelling_raises(llama):
    cancelled = threading.Event()
    steps = steps_of(llama[0], Sampling(max_tokens=9), cancelled=cancelled)
    next(steps)
    cancelled.set()
    with pytest.raises(CancelledError):
        next(steps)


def test_a_seed_repeats_and_samples_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    cpu = torch.device("cpu")
    one, two = (Sampler(Sampling(temperature=0.7, seed=3), cpu) for _ in range(2))
    assert [one(logits) for _ in range(50)] == [two(logits) for _ in range(50)]
    draw = Sampler(Sampling(temperature=2.0, seed=0), cpu)
    counts = torch.bincount(torch.tensor([draw(logits) for _ in range(4000)]), minlength=4) / 4000
    torch.testing.assert_close(counts, (logits / 2).softmax(0), atol=0.03, rtol=0)
    top = Sampler(Sampling(temperature=1.0, top_k=2, seed=0), cpu)
    assert {top(logits) for _ in range(200)} == {0, 1}
    nucleus = Sampler(Sampling(temperature=1.0, top_p=0.5, seed=0), cpu)
    assert {nucleus(logits) for _ in range(200)} == {0}


@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_streamed_pieces_join_to_the_text_before_the_first_stop(byte_tokenizer, text, stop):
    stream = Detokenizer(byte_tokenizer, stop)
    pieces = []
    for token in byte_tokenizer(text, add_special_tokens=False)["input_ids"]:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    expected = text
    for end in range(len(text) + 1):  # the stop that is completed first ends the text, wherever it began
        met = [end - len(s) for s in stop if text[:end].endswith(s)]
        if met:
            expected = text[: min(met)]
            break
    assert "".join(pieces) == expected
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


BAD = [
    {"max_tokens": 0},
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": 0},
    {"stop": ("",)},
    {"min_p": 1.5},
    {"presence_penalty": float("nan")},
    {"frequency_penalty": float("inf")},
    {"repetition_penalty": 0.0},
    {"logit_bias": {3: float("nan")}},
    {"logprobs": 21},
]


@pytest.mark.parametrize("bad", BAD)
def test_bad_sampling_is_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad)).replace("stop", "stop string")):
        Sampling(**bad)


@pytest.mark.parametrize("wrong", [{"logit_bias": {-1: 1.0}}, {"stop_token_ids": (10**6,)}])
def test_ids_that_the_model_does_not_have_are_named(wrong):
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} names token id .* tiny has ids 0 to 99"):
        Sampling(**wrong).check_ids(100, "tiny")


# Penalties, cuts and log-probabilities.


CPU = torch.device("cpu")


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


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-38, 1e-40])
def test_a_temperature_near_zero_is_greedy(llama, temperature):
    """Logits divided by it overflow; the limit is the likeliest token."""
    cold = Sampling(max_tokens=6, temperature=temperature, seed=1)
    assert said(llama[0], cold) == said(llama[0], Sampling(max_tokens=6))
