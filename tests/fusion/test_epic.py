"""EPIC's bad input and limits; its choice is checked in test_recompute.py."""

from __future__ import annotations

import pytest
import torch
from families import load_tiny, oracle_logits, random_prompt, save_tiny

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import get_method


@pytest.mark.parametrize("first_tokens", [-1, 1.5, "16", None, True])
def test_what_is_no_count_is_refused(first_tokens):
    with pytest.raises(ConfigError, match=r"first_tokens is .*0 or more"):
        get_method("epic", first_tokens=first_tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral", "mistral-window", "gemma2"])
def test_no_token_is_reposition_and_all_of_them_behind_a_first_chunk_that_saw_the_prefix_are_full(family, tmp_path):
    """Law 3 as far as it can hold: the first chunk keeps its own keys, which are exact behind the prefix."""
    lm, oracle = load_tiny(family, tmp_path)
    prompt = random_prompt(51)
    n = prompt.num_tokens
    every = rc.fuse(lm, prompt, "epic", first_tokens=99, recipe="prefix").next_logits
    plain = oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril())
    torch.testing.assert_close(every / plain.abs().max(), plain / plain.abs().max(), atol=2e-5, rtol=0)
    none = rc.fuse(lm, prompt, "epic", first_tokens=0)
    assert torch.equal(none.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(none.computed_tokens) == {len(prompt.suffix_ids)}


def test_with_one_chunk_there_is_nothing_to_run(tmp_path):
    lm = rc.load_lm(save_tiny("llama", str(tmp_path)))
    prompt = random_prompt(52, chunks=(9,))
    assert set(rc.fuse(lm, prompt, "epic").computed_tokens) == {len(prompt.suffix_ids)}
