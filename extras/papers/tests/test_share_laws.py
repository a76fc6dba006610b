"""Law 3 for every method that runs a share of the passages' tokens again: all are full prefill, none is reposition."""

import pytest
import torch
from families import FAMILIES, assert_same, causal, oracle_logits, random_prompt

import ragcache as rc

ALL_AND_NONE = {
    "a3": ({"ratio": 1}, {"ratio": 0}),
    "prophet": ({"ratio": 1}, {"ratio": 0}),
    "kvshare": ({"ratio": 1}, {"ratio": 0, "decode_tokens": 0}),
    # With blocks that were read behind the prefix the first passage's is exact, and all others run again.
    "cachecraft": ({"alpha": 2, "recipe": "prefix"}, {"alpha": 0}),
}


@pytest.mark.parametrize("method", ALL_AND_NONE)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_tokens_are_full_prefill_and_none_is_reposition(load, family, method):
    """With none, it is the very same computation; with all, there is nothing to ask or to run while answering."""
    lm, oracle = load(family)
    prompt, (every, none) = random_prompt(44), ALL_AND_NONE[method]
    whole = rc.fuse(lm, prompt, method, **every)
    assert_same(whole.next_logits, oracle_logits(oracle, prompt, causal(prompt.num_tokens)))
    if "recipe" not in every:
        assert set(whole.computed_tokens) == {prompt.num_tokens - len(prompt.prefix_ids)}
    assert whole.cache.step is None
    apart = rc.fuse(lm, prompt, method, **none)
    assert torch.equal(apart.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(apart.computed_tokens) == {len(prompt.suffix_ids)}
