"""Full prefill that goes on from exact KV of a prompt's first tokens, and questions over one shared context.

test_laws.py holds exact KV in every family.
"""

import pytest
import torch
from families import assert_same, causal_logits, random_prompt

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import METHODS, get_method
from ragcache.kv.fused_cache import FusedCache
from ragcache.kv.prefix_cache import PrefixCache, read_cache
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling


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


# Questions over one shared context: every method that shares reads them as it reads each by itself.


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


@pytest.mark.parametrize("method", sorted(SHARING))
def test_a_method_answers_alike_over_a_shared_context(family, method):
    """Logits and further tokens, of the question that shared its context too. Law 1 over one: test_laws.py and this."""
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
    if method == "reposition":
        assert set(over.computed_tokens) == {3}
        assert set(over.kept_tokens) == {second.num_tokens}
        assert over.cached_tokens == second.context_tokens
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
