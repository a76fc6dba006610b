"""KVCOMM: its limits, its formula in NumPy over what plain transformers projects, and its pool."""

import gc
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from families import FAMILIES, METHOD_FAMILIES, assert_same, oracle_logits, random_prompt, saved_tiny

import ragcache as rc
from ragcache.fusion import get_method
from ragcache.kv.block import KVBlock
from ragcache_papers import kvcomm
from ragcache_papers.anchors import Anchor, AnchorPool, Scope

CHUNKS = (9, 14, 6)
LAYERS, HEADS, WIDTH = 3, 2, 12  # of the tiny Llama
ALWAYS = {"threshold": 1.0}
ORDERS = ((0, 1, 2), (1, 0, 2), (2, 1, 0))


def ordered(prompt, order):
    return replace(prompt, chunk_ids=[prompt.chunk_ids[rank] for rank in order])


def full_logits(oracle, prompt):
    n = prompt.num_tokens
    return oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril())


def told(lm, prompt, orders=ORDERS, **options):
    """A method that has read the passages in these orders, all in full."""
    strict = get_method("kvcomm", **{**options, "threshold": 0.0})
    for order in orders:
        fused = rc.fuse(lm, ordered(prompt, order), strict)
        assert set(fused.computed_tokens) == {prompt.num_tokens - len(prompt.prefix_ids)}
    method = get_method("kvcomm", **options)
    vars(method).update(pool=strict.pool)
    return method


def ran_suffix(fused):
    return set(fused.computed_tokens) == {len(fused.prompt.suffix_ids)}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_empty_pool_is_full_prefill_and_so_is_the_same_context_again(load, family):
    """Then with another question, and only the suffix runs: keys are un-rotated and rotated again."""
    lm, oracle = load(family)
    prompt = random_prompt(81)
    method = get_method("kvcomm")
    first = rc.fuse(lm, prompt, method)
    assert_same(first.next_logits, full_logits(oracle, prompt))
    assert set(first.computed_tokens) == {prompt.num_tokens - len(prompt.prefix_ids)}
    asked = replace(prompt, suffix_ids=[7, 8, 9, 10])
    again = rc.fuse(lm, asked, method)
    assert ran_suffix(again)
    assert_same(again.next_logits, full_logits(oracle, asked))
    for layer in range(lm.num_layers):
        for found, expected in zip(again.cache.layer_state(layer)[:2], first.cache.layer_state(layer)[:2], strict=True):
            assert_same(found[:, :, : prompt.context_tokens], expected[:, :, : prompt.context_tokens])


def test_the_same_passages_behind_another_prefix_are_another_context(load):
    lm, oracle = load("llama")
    prompt = random_prompt(82)
    method = told(lm, prompt, orders=[(0, 1, 2, 3)])
    other = replace(prompt, prefix_ids=[*prompt.prefix_ids[:-1], 9])
    fused = rc.fuse(lm, other, method)
    assert not ran_suffix(fused)
    assert_same(fused.next_logits, full_logits(oracle, other))


# The formula, over hooks of plain transformers' projections


@torch.no_grad()
def projected(oracle, ids):
    """Keys before RoPE and values of a causal pass: float64 [layers, 2, tokens, heads, width]."""
    found, hooks = [], []
    for layer in oracle.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            hooks.append(projection.register_forward_hook(lambda _, __, out: found.append(out[0].double().numpy())))
    oracle(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.stack(found).reshape(LAYERS, 2, len(ids), HEADS, WIDTH)


def before(prompt, rank):
    return [*prompt.prefix_ids, *(id for chunk in prompt.chunk_ids[:rank] for id in chunk)]


def about(oracle, ids):
    table = oracle.model.embed_tokens.weight.detach().double().numpy()
    weights = np.exp([-(len(ids) - 1 - place) / 32 for place in range(len(ids))])
    return (table[ids] * (weights / weights.sum())[:, None]).sum(0)


def weights_for(oracle, prompt, rank, earlier, temperature):
    """Of the block and of each anchor of the passage that stands at `rank` of the prompt."""
    chunk = prompt.chunk_ids[rank]
    here = about(oracle, before(prompt, rank))
    contexts = [about(oracle, before(one, one.chunk_ids.index(chunk))) for one in earlier]
    distances = np.array([np.linalg.norm(here), *(np.linalg.norm(here - context) for context in contexts)])
    powers = np.exp(-distances / (temperature * distances.mean()))
    return powers / powers.sum()


def expected_kv(oracle, prompt, rank, earlier, temperature):
    """block + sum of w (anchor - block), before RoPE."""
    chunk = prompt.chunk_ids[rank]
    block = projected(oracle, chunk)
    weights = weights_for(oracle, prompt, rank, earlier, temperature)[1:]
    offset = 0.0
    for weight, one in zip(weights, earlier, strict=True):
        ids = [*before(one, one.chunk_ids.index(chunk)), *chunk]
        offset = offset + weight * (projected(oracle, ids)[:, :, -len(chunk) :] - block)
    return block + offset


def rotated(keys, start):
    """RoPE by its formula, of [..., tokens, heads, width]."""
    half = WIDTH // 2
    angles = np.arange(start, start + keys.shape[-3])[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = keys[..., :half], keys[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_offsets_are_interpolated_and_added(load, temperature):
    lm, oracle = load("llama")
    prompt = random_prompt(83, chunks=CHUNKS)
    method = told(lm, prompt, temperature=temperature, **ALWAYS)
    new = ordered(prompt, (2, 0, 1))  # passage 2 behind the prefix was seen exactly so, the others were not
    earlier = [ordered(prompt, order) for order in ORDERS]
    fused = rc.fuse(lm, new, method)
    assert ran_suffix(fused)
    starts = list(accumulate((len(chunk) for chunk in new.chunk_ids), initial=len(new.prefix_ids)))
    exact = projected(oracle, [*new.prefix_ids, *new.chunk_ids[0]])[:, :, len(new.prefix_ids) :]
    for rank, chunk in enumerate(new.chunk_ids):
        wanted = expected_kv(oracle, new, rank, earlier, temperature) if rank else exact
        for layer in range(LAYERS):
            keys, values = (part[0, :, starts[rank] :][:, : len(chunk)] for part in fused.cache.layer_state(layer)[:2])
            for found, want in ((keys, rotated(wanted[layer, 0], starts[rank])), (values, wanted[layer, 1])):
                assert_same(found, torch.tensor(want.transpose(1, 0, 2), dtype=torch.float32))


def test_offsets_of_zero_are_reposition(load):
    """Passages that no context changed: every anchor is the block."""
    lm, _ = load("llama")
    prompt, scope = random_prompt(84, chunks=CHUNKS), Scope()
    method = get_method("kvcomm", **ALWAYS)
    blocks = rc.encode(lm, prompt)
    for order in ORDERS[:2]:
        rc.fuse(lm, ordered(prompt, order), method, scope=scope)
    for anchor in [anchor for anchor, _ in method.pool._held[scope].values()]:
        (block,) = (block for block in blocks if block.num_tokens == anchor.block.num_tokens)
        method.pool.put(scope, replace(anchor, block=block))
    new = ordered(prompt, (2, 0, 1))
    fused = rc.fuse(lm, new, method, scope=scope)
    assert ran_suffix(fused)
    assert_same(fused.next_logits, rc.fuse(lm, new, "reposition").next_logits)


@pytest.mark.parametrize("family", METHOD_FAMILIES)
def test_a_passage_without_two_anchors_has_the_whole_prompt_read(load, family):
    lm, oracle = load(family)
    prompt = random_prompt(85, chunks=CHUNKS)
    method = told(lm, prompt, orders=ORDERS[:1], **ALWAYS)
    second, stranger = ordered(prompt, (2, 0, 1)), ordered(prompt, (1, 2, 0))
    stranger = replace(stranger, chunk_ids=[*stranger.chunk_ids[:2], [5, 6, 7]])
    for new in (second, stranger):  # each passage has one anchor; then two have two, and one has none
        fused = rc.fuse(lm, new, method)
        assert not ran_suffix(fused)
        assert_same(fused.next_logits, full_logits(oracle, new))
    assert ran_suffix(rc.fuse(lm, ordered(prompt, (2, 1, 0)), method))


def test_the_entropy_of_the_weights_decides(load):
    """Its share of the highest possible, taken by brute force; every passage has to be inside."""
    lm, oracle = load("llama")
    prompt = random_prompt(86, chunks=CHUNKS)
    new, earlier = ordered(prompt, (2, 0, 1)), [ordered(prompt, order) for order in ORDERS]
    shares = []
    for rank in (1, 2):
        weights = weights_for(oracle, new, rank, earlier, 0.4)
        shares.append(-sum(w * math.log(w) for w in weights) / math.log(len(weights)))
    assert 0.05 < min(shares) < max(shares) - 1e-3 < 1
    for threshold, reused in ((max(shares) + 1e-4, True), (max(shares) - 1e-4, False), (min(shares) - 1e-4, False)):
        method = told(lm, prompt, temperature=0.4, threshold=threshold)
        assert ran_suffix(rc.fuse(lm, new, method)) is reused


def test_weights_of_one_size_are_inside_a_threshold_of_1():
    """Whatever float32 makes of their entropy."""
    assert {kvcomm._entropy(torch.softmax(torch.zeros(count), 0)) <= 1.0 for count in range(3, 22)} == {True}


def test_one_scope_or_model_finds_nothing_of_another(load):
    lm, _ = load("llama")
    prompt, scope = random_prompt(87, chunks=CHUNKS), Scope()
    method = get_method("kvcomm", **ALWAYS)
    for where in (None, scope):
        assert not ran_suffix(rc.fuse(lm, prompt, method, scope=where))
    for where in (None, scope):
        assert ran_suffix(rc.fuse(lm, prompt, method, scope=where))
    assert not ran_suffix(rc.fuse(lm, prompt, method, scope=Scope()))
    other, other_oracle = load("granite")  # of the same shape
    assert_same(rc.fuse(other, prompt, method, scope=scope).next_logits, full_logits(other_oracle, prompt))
    assert not ran_suffix(rc.fuse(lm, prompt, get_method("kvcomm", **ALWAYS)))


def test_what_is_kept_goes_with_its_scope(load):
    lm, _ = load("llama")
    prompt, scope = random_prompt(88, chunks=CHUNKS), Scope()
    method = get_method("kvcomm")
    rc.fuse(lm, prompt, method, scope=scope)
    assert method.pool.num_bytes > sum(block.num_bytes for block in rc.encode(lm, prompt))
    del scope
    gc.collect()
    assert method.pool.num_bytes == 0


def test_the_budget_holds_and_a_pool_of_nothing_reads_in_full(load):
    lm, oracle = load("llama")
    prompt = random_prompt(89, chunks=CHUNKS)
    once = told(lm, prompt, orders=ORDERS[:1])
    whole = once.pool.num_bytes
    method = get_method("kvcomm", pool_bytes=2 * whole)
    for seed in range(90, 96):
        rc.fuse(lm, random_prompt(seed, chunks=CHUNKS), method)
        assert 0 < method.pool.num_bytes <= 2 * whole
    assert ran_suffix(rc.fuse(lm, random_prompt(95, chunks=CHUNKS), method))
    assert not ran_suffix(rc.fuse(lm, random_prompt(90, chunks=CHUNKS), method))
    nothing = get_method("kvcomm", pool_bytes=0)
    for _ in range(2):
        fused = rc.fuse(lm, prompt, nothing)
        assert not ran_suffix(fused)
        assert_same(fused.next_logits, full_logits(oracle, prompt))


def test_what_is_kept_is_no_view_of_buffers_that_others_use_next(load):
    lm, oracle = load("llama")
    prompt = random_prompt(97)
    method = get_method("kvcomm")
    rc.fuse(lm, prompt, method).cache.release()
    rc.fuse(lm, random_prompt(98), "full").cache.release()
    fused = rc.fuse(lm, prompt, method)
    assert ran_suffix(fused)
    assert_same(fused.next_logits, full_logits(oracle, prompt))


def test_many_threads_share_a_pool(load):
    lm, oracle = load("llama")
    prompts = [random_prompt(seed % 3, chunks=CHUNKS) for seed in range(24)]
    method = get_method("kvcomm", pool_bytes=60_000)
    with ThreadPoolExecutor(8) as threads:
        fused = list(threads.map(lambda prompt: rc.fuse(lm, prompt, method).next_logits, prompts))
    for prompt, found in zip(prompts, fused, strict=True):
        assert_same(found, full_logits(oracle, prompt))
    assert method.pool.num_bytes <= 60_000


def test_evicting_and_an_empty_prompt_are_as_with_any_method(load):
    lm, oracle = load("llama")
    prompt = random_prompt(99, chunks=CHUNKS)
    method = told(lm, prompt, orders=ORDERS[:1])
    fused = rc.fuse(lm, prompt, method, evict=4)
    assert ran_suffix(fused)
    assert set(fused.kept_tokens) == {4 + len(prompt.prefix_ids) + len(prompt.suffix_ids)}
    bare = replace(prompt, chunk_ids=[])
    assert_same(rc.fuse(lm, bare, method).next_logits, full_logits(oracle, bare))


def test_options_that_agree_make_equal_methods():
    assert get_method("kvcomm") == get_method("kvcomm") != get_method("kvcomm", threshold=0.4)


# The pool


def anchor(passage, context, tokens=1):
    shape = (1, 1, tokens, 4)
    return Anchor(passage.encode(), context.encode(), torch.zeros(2), KVBlock(torch.zeros(shape), torch.zeros(shape)))


def names(pool, scope, *passages):
    return [one.context.decode() for passage in passages for one in pool.of(scope, passage.encode())]


ONE = anchor("a", "x").num_bytes


def test_the_least_recently_used_makes_room_in_whatever_scope_it_is():
    pool, first, second = AnchorPool(3 * ONE, 9), Scope(), Scope()
    pool.put(first, anchor("a", "1"))
    pool.put(second, anchor("a", "2"))
    pool.put(first, anchor("b", "3"))
    pool.put(first, anchor("a", "1"))  # used again
    pool.put(second, anchor("c", "4"))
    assert (names(pool, first, "a", "b"), names(pool, second, "a", "c")) == (["1", "3"], ["4"])
    assert pool.num_bytes == 3 * ONE


def test_a_passage_has_so_many_anchors_and_one_of_each_context():
    pool, scope = AnchorPool(1 << 20, 2), Scope()
    for context in ("1", "2", "1", "3"):
        pool.put(scope, anchor("a", context))
    pool.put(scope, anchor("b", "2"))
    assert (names(pool, scope, "a"), names(pool, scope, "b")) == (["1", "3"], ["2"])


def test_what_is_larger_than_the_budget_drops_nothing():
    pool, scope = AnchorPool(2 * ONE, 9), Scope()
    pool.put(scope, anchor("a", "1"))
    pool.put(scope, anchor("b", "2", tokens=9))
    assert (names(pool, scope, "a"), names(pool, scope, "b")) == (["1"], [])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "smollm3", "mistral-window"])
def test_what_was_observed_is_interpolated_on_the_device(family):
    """Its anchors lie in host memory. The last prompt is answered out of two contexts of each passage."""
    lm, on_cpu = rc.load_lm(saved_tiny(family), device="cuda"), rc.load_lm(saved_tiny(family))
    prompt = random_prompt(5)
    methods = [rc.METHODS["kvcomm"](threshold=1.0) for _ in range(2)]
    for order in ((0, 1, 2, 3), (3, 0, 1, 2), (2, 1, 3, 0)):
        read = rc.Prompt(prompt.prefix_ids, [prompt.chunk_ids[rank] for rank in order], prompt.suffix_ids)
        found, expected = (rc.fuse(one, read, method) for one, method in zip((lm, on_cpu), methods, strict=True))
        assert found.computed_tokens == expected.computed_tokens
        assert_same(found.next_logits.cpu(), expected.next_logits)
    assert set(found.computed_tokens) == {len(prompt.suffix_ids)}
