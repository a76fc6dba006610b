"""Full prefill that goes on from exact KV of the prompt's first tokens, against plain transformers.

test_laws.py holds it in every family.
"""

from __future__ import annotations

import pytest
import torch
from families import assert_same, causal_logits, random_prompt

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.kv.prefix_cache import PrefixCache, read_cache


def keep(tree, ids, fused, answer=()):
    held = [*ids, *answer][: fused.cache.get_seq_length()]
    assert tree.insert("full", held, read_cache(fused.cache)) == len(held)


def prompts():
    """Two that share prefix, one passage and a part of the next one; and the first one again."""
    first = random_prompt(1, prefix=5, chunks=(14, 9), suffix=6)
    second = rc.Prompt(first.prefix_ids, [first.chunk_ids[0], [*first.chunk_ids[1][:4], 7, 8]], [9, 10, 11])
    return first, second


def test_an_answer_is_a_prefix_too(llama):
    lm, oracle = llama
    first, _ = prompts()
    tree = PrefixCache(lm.shape, 1 << 24)
    fused = rc.fuse(lm, first, "full", reserve_tokens=2)
    answer, logits = [], fused.next_logits
    for at in range(4):
        answer.append(int(logits.argmax()))
        logits = lm.run(answer[-1:], first.num_tokens + at, fused.cache)
    keep(tree, first.ids, fused, answer)
    longer = rc.Prompt([*first.ids, *answer], [[5, 6, 7]], [8, 9])
    with tree.match("full", longer.ids) as exact:
        assert exact.num_tokens == first.num_tokens + 4
        assert_same(rc.fuse(lm, longer, "full", exact=exact).next_logits, causal_logits(oracle, longer.ids))


@pytest.mark.parametrize("seed", range(4))
def test_a_growing_tree_changes_no_answer(llama, seed):
    """Random prompts that share random beginnings, with a budget that is too small for them."""
    lm, oracle = llama
    generator = torch.Generator().manual_seed(seed)
    tree = PrefixCache(lm.shape, 90 * lm.kv_bytes_per_token, page_tokens=5)
    matched = 0
    for _ in range(12):
        chunks = [[5 + int(c)] * 9 for c in torch.randint(0, 3, (3,), generator=generator)]
        prompt = rc.Prompt([3, 4], chunks, torch.randint(3, 9, (3,), generator=generator).tolist())
        with tree.match("full", prompt.ids) as exact:
            exact.cut(prompt.num_tokens - 1)
            matched += exact.num_tokens
            fused = rc.fuse(lm, prompt, "full", exact=exact)
        assert_same(fused.next_logits, causal_logits(oracle, prompt.ids))
        tree.insert("full", prompt.ids, read_cache(fused.cache))
    assert matched > 12 * 2
    assert tree.stats().evicted_tokens


def test_eviction_votes_with_the_whole_suffix(llama):
    lm, _ = llama
    first, _ = prompts()
    tree = PrefixCache(lm.shape, 1 << 24)
    keep(tree, first.ids, rc.fuse(lm, first, "full"))
    expected = rc.fuse(lm, first, "full", evict=5)
    with tree.match("full", first.ids) as exact:
        exact.cut(first.num_tokens - 1)
        with pytest.raises(ConfigError, match=f"the suffix has to run; give that of {first.context_tokens} at most"):
            rc.fuse(lm, first, "full", exact=exact, evict=5)
        exact.cut(first.context_tokens)
        got = rc.fuse(lm, first, "full", exact=exact, evict=5)
    assert got.kept_tokens == expected.kept_tokens
    for layer in range(lm.shape.num_layers):
        for ours, theirs in zip(got.cache.layer_state(layer), expected.cache.layer_state(layer), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_prefix_that_cannot_be_used_is_named(llama):
    lm, _ = llama
    first, _ = prompts()
    tree = PrefixCache(lm.shape, 1 << 24)
    keep(tree, first.ids, rc.fuse(lm, first, "full"))
    with tree.match("full", first.ids) as exact:
        with pytest.raises(ConfigError, match=f"the last token has to run; give that of {first.num_tokens - 1} at"):
            rc.fuse(lm, first, "full", exact=exact)
        exact.cut(3)
        with pytest.raises(ConfigError, match="'reposition' reads blocks"):
            rc.fuse(lm, first, "reposition", exact=exact)
