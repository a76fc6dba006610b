"""CacheBlend: law 3, and its choice against a plain forward that compares keys and values token by token."""

from __future__ import annotations

import math

import pytest
import torch
from blend_oracle import blended_logits, most_deviating
from covering import covering
from families import METHOD_FAMILIES, assert_same, causal_logits, random_prompt

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import get_method

CHOSEN_ON = ["llama", "qwen3", "phi3-partial", "mixtral", "mistral-window", "gemma2", "smollm3", "gpt_oss"]
CHUNKS = (17, 3, 20, 12)


@pytest.mark.parametrize(("family", "ratio"), covering(CHOSEN_ON, [0.15, 0.5]))
def test_the_most_deviating_tokens_run(load, family, ratio):
    lm, oracle = load(family)
    prompt = random_prompt(31, prefix=6, chunks=CHUNKS)
    count = round(ratio * sum(CHUNKS))
    expected = blended_logits(oracle, prompt, most_deviating(oracle, prompt, [sum(CHUNKS), count, count]))
    fused = rc.fuse(lm, prompt, "cacheblend", ratio=ratio)
    assert_same(fused.next_logits, expected)
    everyone, suffix = sum(CHUNKS) + len(prompt.suffix_ids), len(prompt.suffix_ids)
    assert fused.computed_tokens == (everyone, everyone, count + suffix)  # layer 1 projects all of them


@pytest.mark.parametrize("family", CHOSEN_ON)
def test_gradual_filtering_narrows_among_those_that_ran_below(load, family):
    lm, oracle = load(family)
    prompt = random_prompt(32, prefix=4, chunks=CHUNKS)
    total = sum(CHUNKS)
    counts = [total, round(1.25 * 0.4 * total), round(0.75 * 0.4 * total)]
    expected = blended_logits(oracle, prompt, most_deviating(oracle, prompt, counts))
    fused = rc.fuse(lm, prompt, "cacheblend", ratio=0.4, gradual=True)
    assert_same(fused.next_logits, expected)
    suffix = len(prompt.suffix_ids)
    assert fused.computed_tokens == (total + suffix, total + suffix, counts[1] + suffix)  # layer 2 projects layer 1's


def test_gradual_filtering_runs_the_ratio_on_average_and_never_more_than_all():
    class Shape:
        num_layers = 12

    class Context:
        chunk_tokens = (700, 300)
        lm = type("Model", (), {"shape": Shape})

    for ratio in (0.0, 0.16, 0.9, 1.0):
        counts = get_method("cacheblend", ratio=ratio, gradual=True)._counts(Context)
        assert counts[0] == 1000
        assert sum(counts[1:]) / 11 == pytest.approx(1000 * ratio, abs=0.5)
        assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(("family", "gradual"), covering(METHOD_FAMILIES, [False, True]))
def test_all_tokens_are_full_prefill_and_none_is_reposition(load, family, gradual):
    """Law 3. With none, it is the very same computation."""
    lm, oracle = load(family)
    prompt = random_prompt(33)
    every = rc.fuse(lm, prompt, "cacheblend", ratio=1, gradual=gradual)
    assert_same(every.next_logits, causal_logits(oracle, prompt.ids))
    none = rc.fuse(lm, prompt, "cacheblend", ratio=0, gradual=gradual)
    assert torch.equal(none.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(none.computed_tokens) == {len(prompt.suffix_ids)}


def test_a_share_that_rounds_to_no_token_is_reposition(load):
    lm, _ = load("llama")
    prompt = random_prompt(34)
    fused = rc.fuse(lm, prompt, "cacheblend", ratio=0.01)
    assert torch.equal(fused.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


@pytest.mark.parametrize("ratio", [-0.01, 1.01, math.nan, math.inf, "0.5", None, True])
def test_what_is_no_share_is_refused(ratio):
    with pytest.raises(ConfigError, match=r"ratio is .*from 0 to 1"):
        get_method("cacheblend", ratio=ratio)


def test_gradual_is_a_switch():
    with pytest.raises(ConfigError, match="gradual is 3; choose True or False"):
        get_method("cacheblend", gradual=3)
