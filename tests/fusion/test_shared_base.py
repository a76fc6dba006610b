"""Questions over one shared context: every method that shares reads them as it reads each by itself."""

from __future__ import annotations

import pytest
import torch
from families import assert_same, block_diagonal, oracle_logits, random_prompt

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import METHODS, get_method
from ragcache.kv.fused_cache import FusedCache
from ragcache.kv.prefix_cache import PrefixCache, read_cache
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling

LINKS = [[20, 21], [], [22], [23, 24, 25]]
SHARING = {
    "reposition": {},
    "concat": {},
    "full": {},
    "link": {"link_ids": LINKS},
    "packet": {"header_ids": [7, 8], "trailer_ids": [9]},
}


def another(prompt, *suffix):
    return rc.Prompt(prompt.prefix_ids, prompt.chunk_ids, list(suffix))


def test_law_1_over_a_shared_context(family):
    lm, oracle = family
    first = random_prompt(3, prefix=4)
    second = another(first, 7, 9, 11)
    base = rc.fuse(lm, first, "reposition").share()
    fused = rc.fuse(lm, second, "reposition", base=base)
    assert_same(fused.next_logits, oracle_logits(oracle, second, block_diagonal(second)))
    assert set(fused.computed_tokens) == {3}
    assert set(fused.kept_tokens) == {second.num_tokens}
    assert fused.cached_tokens == second.context_tokens


@pytest.mark.parametrize("method", sorted(SHARING))
def test_a_method_answers_alike_over_a_shared_context(family, method):
    """Logits and further tokens, of the question that shared its context too."""
    lm, _ = family
    options = SHARING[method]
    first = random_prompt(5, prefix=4)
    second = another(first, 7, 9, 11)

    def answer(fused):
        steps = decode(lm, fused.cache, fused.next_logits, fused.next_position, Sampling(max_tokens=5))
        return fused.next_logits, list(steps)

    expected = [answer(rc.fuse(lm, prompt, method, **options)) for prompt in (first, second)]
    owner = rc.fuse(lm, first, method, **options)
    over = rc.fuse(lm, second, method, base=owner.share(), **options)
    for (logits, ids), (wanted, wanted_ids) in zip((answer(owner), answer(over)), expected, strict=True):
        assert_same(logits, wanted)
        assert ids == wanted_ids


def test_which_methods_share():
    """Methods whose context does not depend on the question share it; one that chooses by it reads by itself."""
    sharing = {name for name in METHODS if get_method(name).shares_context}
    assert sharing == {"reposition", "concat", "link", "markers", "packet", "full"}
    assert not get_method("full", reuse=False).shares_context


def test_a_context_of_something_else_is_refused(llama):
    lm, _ = llama
    prompt = random_prompt(1)
    base = rc.fuse(lm, prompt).share()
    other = rc.Prompt(prompt.prefix_ids, prompt.chunk_ids[:-1], prompt.suffix_ids)
    with pytest.raises(ConfigError, match=r"a context of \d+ tokens was given for a prompt with \d+ before its suffix"):
        rc.fuse(lm, other, base=base)
    with pytest.raises(ConfigError, match="'a3' reads every prompt by itself"):
        rc.fuse(lm, prompt, "a3", base=base)
    dropped = rc.fuse(lm, random_prompt(2, chunks=(60, 50)), "samkv")
    if len(set(dropped.kept_tokens)) > 1 or min(dropped.kept_tokens) < dropped.prompt_tokens:
        with pytest.raises(ConfigError, match=r"can be shared.*without eviction"):
            dropped.share()
    assert torch.isfinite(rc.fuse(lm, prompt, base=base).next_logits).all()


@torch.inference_mode()  # as passes write: the pool lends buffers that were made in one
def test_the_tree_reads_a_base_where_it_is(family, monkeypatch):
    """What `full` computed over a shared context is kept page by page, and nothing of the context is joined."""
    lm, _ = family
    first = random_prompt(5, prefix=4)
    second = another(first, 7, 9, 11)
    wanted = rc.fuse(lm, second, "full").cache
    cache = rc.fuse(lm, second, "full", base=rc.fuse(lm, first, "full").share()).cache
    tree = PrefixCache(lm.shape, 1 << 24, page_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(FusedCache, "layer_state", None)
        assert tree.insert("full", second.ids, read_cache(cache)) == second.num_tokens
    held = lm.new_cache(second.num_tokens)
    with tree.match("full", second.ids) as lease:
        for layer in range(lm.shape.num_layers):
            keys, values = held.reserve(layer, torch.arange(second.num_tokens))
            lease.copy_layer(layer, keys[0], values[0])
            expected = wanted.layer_state(layer)
            torch.testing.assert_close(keys, expected[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, expected[1], atol=1e-4, rtol=1e-4)
