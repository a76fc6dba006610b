"""Laws 1 to 3 of fused prefill, in float32, against plain transformers under an explicit mask."""

import pytest
from covering import covering
from families import FAMILIES, assert_same, block_diagonal, causal_logits, oracle_logits, random_prompt

import ragcache as rc
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.kv.exact import read_cache


@pytest.mark.parametrize(("family", "seed"), covering(sorted(FAMILIES), range(3)), indirect=["family"])
def test_reposition_is_one_block_diagonal_forward(family, seed):
    lm, oracle = family
    prompt = random_prompt(seed, prefix=seed * 3, chunks=(7, 13, 4, 9)[: seed + 2])
    fused = rc.fuse(lm, prompt, method="reposition", blocks=rc.encode(lm, prompt, recipe="isolated"))
    assert_same(fused.next_logits, oracle_logits(oracle, prompt, block_diagonal(prompt)))
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


def test_full_is_plain_transformers(family):
    lm, oracle = family
    prompt = random_prompt(5)
    assert_same(rc.fuse(lm, prompt, method="full").next_logits, causal_logits(oracle, prompt.ids))


def test_full_goes_on_from_an_exact_prefix(family):
    """The prefix ends within a chunk, or before the last token, and sliding windows begin within it."""
    lm, oracle = family
    first = random_prompt(1, prefix=5, chunks=(14, 9))
    second = rc.Prompt(first.prefix_ids, [first.chunk_ids[0], [*first.chunk_ids[1][:4], 7, 8]], [9, 10, 11])
    tree = PrefixCache(lm.shape, 1 << 24, page_tokens=4)
    tree.insert("full", first.ids, read_cache(rc.fuse(lm, first, method="full").cache))
    for prompt, shared in ((second, 23), (first, first.num_tokens - 1)):
        n = prompt.num_tokens
        with tree.match("full", prompt.ids) as exact:
            exact.cut(n - 1)
            fused = rc.fuse(lm, prompt, method="full", exact=exact)
        assert set(fused.computed_tokens) == {n - shared}
        assert_same(fused.next_logits, causal_logits(oracle, prompt.ids))
        tree.insert("full", prompt.ids, read_cache(fused.cache))


# Methods that add trained tokens read another prompt: test_link.py and test_markers.py hold them to law 2.
UNTRAINED = sorted(row.name for row in rc.methods() if not row.needs_training)


UNLIKE = {"llama", "gemma4", "gpt_oss", "smollm3", "deepseek_v2"}
"""Families whose attention differs most. The commit run holds the others to law 2 by `reposition`."""


@pytest.mark.parametrize(
    ("family", "method"),
    [
        (family, method)
        if method == "reposition" or family in UNLIKE
        else pytest.param(family, method, marks=pytest.mark.slow)
        for family in sorted(FAMILIES)
        for method in UNTRAINED
    ],
    indirect=["family"],
)
def test_one_chunk_behind_the_prefix_is_full_prefill(family, method):
    lm, oracle = family
    prompt = random_prompt(7, prefix=6, chunks=(17,))
    fused = rc.fuse(lm, prompt, method=method, recipe="prefix")
    assert_same(fused.next_logits, causal_logits(oracle, prompt.ids))
