"""Law 3 for every method that recomputes a share of the tokens: all are full prefill, none is `reposition`."""

import pytest
import torch
from families import FAMILIES, assert_same, causal, oracle_logits, random_prompt

import ragcache as rc


@pytest.mark.parametrize("method", ["a3", "prophet"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_tokens_are_full_prefill_and_none_is_reposition(load, family, method):
    """With no tokens, the computation is the same; with all tokens, no scores are needed."""
    lm, oracle = load(family)
    prompt = random_prompt(44)
    whole = rc.fuse(lm, prompt, method, ratio=1)
    assert_same(whole.next_logits, oracle_logits(oracle, prompt, causal(prompt.num_tokens)))
    assert set(whole.computed_tokens) == {prompt.num_tokens - len(prompt.prefix_ids)}
    apart = rc.fuse(lm, prompt, method, ratio=0)
    assert torch.equal(apart.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(apart.computed_tokens) == {len(prompt.suffix_ids)}
