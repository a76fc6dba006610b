"""Choosing tokens, stop strings and streaming, against transformers' generate and plain string operations."""

from __future__ import annotations

import threading

import pytest
import torch
from families import random_prompt, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError
from ragcache.models.generate import Detokenizer, decode
from ragcache.models.sampler import Sampler, Sampling


@pytest.fixture
def llama():
    return tiny("llama")


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
    prompt = random_prompt(1)
    fused = rc.fuse(lm, prompt, method="full")
    got = list(decode(lm, fused.cache, fused.next_logits, prompt.num_tokens, Sampling(max_tokens=40)))
    expected = oracle.generate(
        torch.tensor([prompt.ids]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, prompt.num_tokens :]
    assert got == expected.tolist()


def test_eos_ends_the_answer_and_is_not_part_of_it(llama):
    lm, _ = llama
    prompt = random_prompt(1)

    def run(**kwargs):
        fused = rc.fuse(lm, prompt)
        return list(decode(lm, fused.cache, fused.next_logits, prompt.num_tokens, Sampling(max_tokens=20), **kwargs))

    free = run()
    eos = free[5]
    assert run(eos_ids=(eos,)) == free[: free.index(eos)]


def test_decoding_stops_at_the_last_position(llama):
    lm, _ = llama
    prompt = rc.Prompt([], [[5] * 505], [6])
    fused = rc.fuse(lm, prompt)
    got = list(decode(lm, fused.cache, fused.next_logits, prompt.num_tokens, Sampling(max_tokens=50)))
    assert len(got) == lm.max_positions - prompt.num_tokens


def test_cancelling_raises(llama):
    lm, _ = llama
    prompt = random_prompt(1)
    fused = rc.fuse(lm, prompt)
    cancelled = threading.Event()
    steps = decode(lm, fused.cache, fused.next_logits, prompt.num_tokens, Sampling(max_tokens=9), cancelled=cancelled)
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


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}, {"stop": ("",)}]
)
def test_bad_sampling_is_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad)).replace("stop", "stop string")):
        Sampling(**bad)
