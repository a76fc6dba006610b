"""Choosing tokens, stop strings and streaming, against transformers' own code, plain strings and published formulas.
Answers of a given form: JSON that a validator accepts, matches of Python's `re`, one of the choices."""

import json
import re
import threading

import jsonschema
import numpy as np
import pytest
import tiny_model
import torch
from covering import covering
from families import random_prompt, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.makers import made_by, tiny_lm
from transformers import RepetitionPenaltyLogitsProcessor

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError
from ragcache.models.card import eos_token_ids
from ragcache.models.deadline import Limit
from ragcache.models.generate import Detokenizer, decode
from ragcache.models.sampler import Sampler, Sampling

PROMPT = random_prompt(1)


llama = made_by(tiny, "llama")


def steps_of(lm, sampling, prompt=PROMPT, **more):
    fused = rc.fuse(lm, prompt, method="full")
    return decode(lm, fused.cache, fused.next_logits, fused.next_position, sampling, prompt_ids=prompt.ids, **more)


def said(*given, **more):
    return list(steps_of(*given, **more))


byte_tokenizer = made_by(tiny_model.byte_tokenizer)


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
    steps = steps_of(llama[0], Sampling(max_tokens=9), limit=Limit(cancelled))
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
        if stream.stop:
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


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-38, 1e-40])
def test_a_temperature_near_zero_is_greedy(llama, temperature):
    """Logits divided by it overflow; the limit is the likeliest token."""
    cold = Sampling(max_tokens=6, temperature=temperature, seed=1)
    assert said(llama[0], cold) == said(llama[0], Sampling(max_tokens=6))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
BEGUN = "The cat sat on the mat."


lm = tiny_lm()


def written(lm, sampling, prompt=BEGUN):
    """Ids of the answer behind a raw prompt, read in full."""
    ids = lm.tokenizer.encode(prompt)
    fused = rc.fuse(lm, rc.Prompt([], [ids[:-4]], ids[-4:]), method="full")
    steps = decode(lm, fused.cache, fused.next_logits, len(ids), sampling, eos_ids=eos_token_ids(lm))
    return list(steps), fused.next_logits


def text_of(lm, ids):
    return lm.tokenizer.decode(ids)


@pytest.mark.parametrize(("seed", "temperature"), covering(range(5), [0.0, 1.5]))
def test_json_holds_to_its_schema(lm, temperature, seed):
    sampling = rc.Sampling(max_tokens=300, temperature=temperature, seed=seed, json_schema=SCHEMA)
    ids, _ = written(lm, sampling, BEGUN + str(seed))
    jsonschema.validate(json.loads(text_of(lm, ids)), SCHEMA)


def test_any_json_object():
    sampling = rc.Sampling(json_schema='{"type": "object"}')
    assert sampling == rc.Sampling(json_schema={"type": "object"})
    assert len({sampling, rc.Sampling(json_schema={"type": "object"})}) == 1


@pytest.mark.parametrize("expression", [r"[0-9]{3}-[0-9]{2}", r"(yes|no), (sir|madam)[.!]", "a+b?c{2,3}"])
def test_a_match_of_the_expression(lm, expression):
    ids, _ = written(lm, rc.Sampling(max_tokens=40, temperature=1.0, seed=3, regex=expression))
    found = re.fullmatch(expression, text_of(lm, ids))
    assert found or len(ids) == 40  # cut in mid-form: "a+" may go on and on


def plain_choice(lm, choices):
    """Greedy among the tokens that go on with some choice, written out; every byte is a token."""
    ids, eos = lm.tokenizer.encode(BEGUN), min(eos_token_ids(lm))
    wanted = [[*lm.tokenizer.encode(one, add_special_tokens=False), eos] for one in choices]
    said: list[int] = []
    while eos not in said:
        with torch.no_grad():
            logits = lm.model(torch.tensor([[*ids, *said]])).logits[0, -1]
        allowed = sorted({one[len(said)] for one in wanted if one[: len(said)] == said})
        said.append(allowed[int(logits[allowed].argmax())])
    return said[:-1]


@pytest.mark.parametrize("choices", [["yes", "no", "maybe"], ["a", "ab", "abc"], ['quo"te', "new\nline", "é"]])
def test_the_likeliest_way_through_the_choices(lm, choices):
    ids, _ = written(lm, rc.Sampling(max_tokens=40, choices=choices))
    assert ids == plain_choice(lm, choices)
    assert text_of(lm, ids) in choices


def test_a_form_that_forbids_nothing_changes_nothing(lm):
    free, _ = written(lm, rc.Sampling(max_tokens=12))
    text = text_of(lm, free)
    kept, _ = written(lm, rc.Sampling(max_tokens=12, regex="(.|\n)*"))
    valid = len(text.split("�")[0].encode())  # an expression is over characters: no half ones
    assert kept[:valid] == free[:valid]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"json_schema": {"type": "strange"}}, "json_schema cannot be compiled"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[1]"}, "no JSON object"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema is no JSON"),
        ({"regex": "(a"}, "regex cannot be compiled"),
        ({"regex": "a" * (1 << 21)}, "262144 are the most"),
        ({"choices": []}, "at least one"),
        ({"choices": ["a", ""]}, "something in them"),
        ({"choices": ["a"], "regex": "a"}, "exclude each other"),
    ],
)
def test_what_cannot_be_compiled_is_said_at_once(fields, said):
    with pytest.raises(ConfigError, match=said):
        rc.Sampling(**fields)


def test_a_model_without_an_end_is_refused(lm):
    ids = lm.tokenizer.encode(BEGUN)
    fused = rc.fuse(lm, rc.Prompt([], [ids[:-4]], ids[-4:]), method="full")
    with pytest.raises(ConfigError, match="could not end"):
        list(decode(lm, fused.cache, fused.next_logits, len(ids), rc.Sampling(choices=["a"])))
