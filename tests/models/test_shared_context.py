"""Caches that stand on one shared context: each answers as plain transformers does over its whole sequence alone."""

from __future__ import annotations

import gc

import pytest
import torch
from families import assert_same, causal_logits, ids_of, saved_tiny, tiny

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.kv.buffers import BufferPool
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.kv.fused_cache import FusedCache
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces

FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss", "mixtral", "gpt_neox", "smollm3", "mistral-window", "cohere2")
CONTEXT = 31


def run_of(ids, start, cache):
    return ForwardRequest(torch.tensor(ids), torch.arange(start, start + len(ids)), cache, ordered=True)


def context_of(lm, ids, behind=()):
    """A shared context of these tokens, and the cache that it came from, which goes on behind it."""
    owner = lm.new_cache(CONTEXT + 20)
    lm.run([*ids, *behind], 0, owner)
    return owner.share(len(ids)), owner


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_over_one_context_in_one_pass(family):
    """A prompt, a next token, the one that shared it, another context and none at all: by turns and together."""
    lm, oracle = tiny(family)
    shared, other = ids_of(CONTEXT, 1), ids_of(17, 2)
    context, owner = context_of(lm, shared, first := ids_of(4, 3))
    second, _ = context_of(lm, other)
    texts = [[*shared, *ids_of(6, 4)], [*shared, *ids_of(3, 5)], [*shared, *first, 7], [*other, *ids_of(5, 6)], [9, 8]]
    caches = [lm.new_cache(20, base=context), lm.new_cache(1, base=context), owner]
    caches += [lm.new_cache(8, base=second), lm.new_cache(4)]
    lm.run(texts[1][CONTEXT:-1], CONTEXT, caches[1])  # it decodes in the shared pass
    starts = [len(cache.layer_state(0)[2]) for cache in caches]
    rows = zip(texts, starts, caches, strict=True)
    pieces = [ScheduledTokens.next(run_of(ids[start:], start, cache), len(ids) - start) for ids, start, cache in rows]
    for ids, logits in zip(texts, run_pieces(lm.model, pieces), strict=True):
        assert_same(logits, causal_logits(oracle, ids))
    assert caches[0].lengths == [len(texts[0])] * lm.shape.num_layers
    assert caches[0].computed_tokens == (6,) * lm.shape.num_layers
    logits = lm.run([11], len(texts[0]), caches[0])
    assert_same(logits, causal_logits(oracle, [*texts[0], 11]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype):
    lm, half = tiny("llama")[0], rc.load_lm(saved_tiny("llama"), dtype=dtype)
    shared, behind = ids_of(CONTEXT, 1), ids_of(6, 2)
    alone = half.run([*shared, *behind], 0, half.new_cache(64))
    over = half.run(behind, CONTEXT, half.new_cache(16, base=context_of(half, shared)[0]))
    exact = lm.run([*shared, *behind], 0, lm.new_cache(64))
    error = (alone - exact).abs().max()
    assert (over - exact).abs().max() <= 1.5 * error, "no further from float32 than one cache is"


@torch.inference_mode()  # as passes write: the pool lends buffers that were made in one
def test_a_context_is_never_written_to():
    """Whatever the caches on it do: grow, replace entries, drop some, and the one that it came from likewise."""
    lm, oracle = tiny("llama")
    shared = ids_of(CONTEXT, 1)
    context, owner = context_of(lm, shared)
    before = [[part.clone() for part in context.layer_state(layer)] for layer in range(lm.shape.num_layers)]
    standing = [lm.new_cache(1, base=context) for _ in range(3)]
    lm.run(ids_of(300, 2), CONTEXT, standing[0])  # grows
    for cache in (standing[1], owner):
        if cache is not owner:
            lm.run([5], CONTEXT, cache)
        slots = torch.tensor([2, 5, CONTEXT])
        if cache is owner:
            cache.reserve(0, torch.tensor([CONTEXT]))
            for layer in range(1, lm.shape.num_layers):
                cache.reserve(layer, torch.tensor([CONTEXT]))
        lm.run([5, 6, 7], slots, cache, slots=slots)
    lm.run([5], CONTEXT, standing[2])
    for layer in range(lm.shape.num_layers):
        standing[2].retain(layer, torch.tensor([0, 3, CONTEXT]))
    assert standing[1].base is standing[2].base is None
    for layer, parts in enumerate(before):
        for one, part in zip(context.layer_state(layer), parts, strict=True):
            assert torch.equal(one, part)
    assert_same(lm.run([3], CONTEXT, lm.new_cache(4, base=context)), causal_logits(oracle, [*shared, 3]))


@torch.inference_mode()
def test_methods_that_replace_run_over_a_copy():
    """Slots over a base equal slots over one cache."""
    lm, _ = tiny("llama")
    shared = ids_of(CONTEXT, 1)
    slots = torch.tensor([4, 9, CONTEXT])
    results = []
    for base in (None, context_of(lm, shared)[0]):
        cache = lm.new_cache(40, base=base)
        if base is None:
            lm.run(shared, 0, cache)
        for layer in range(lm.shape.num_layers):
            cache.reserve(layer, torch.tensor([CONTEXT]))
        results.append(lm.run([7, 8, 9], slots, cache, slots=slots))
    assert_same(results[1], results[0])


@pytest.mark.parametrize(("tokens", "room"), [(1, 64), (64, 64), (65, 128), (512, 512), (513, 768), (5000, 5120)])
def test_few_tokens_take_little_room(tokens, room):
    shape = CacheShape((LayerShape(1, 4, 4),), torch.float32, torch.device("cpu"))
    cache = FusedCache(BufferPool(shape, 1 << 20), tokens)
    assert cache.capacity == room


def test_buffers_go_back_when_the_last_user_has_gone():
    shape = CacheShape((LayerShape(1, 4, 4),), torch.float32, torch.device("cpu"))
    pool = BufferPool(shape, 1 << 20)
    owner = FusedCache(pool, 4)
    owner.reserve(0, torch.arange(3))
    context = owner.share(2)
    assert context.num_tokens == 2
    standing = FusedCache(pool, 4, base=context)
    assert owner.share(2) is not context
    owner.release()
    assert not pool._idle, "the context needs them"
    del context
    gc.collect()
    assert not pool._idle, "a cache stands on it"
    standing.release()
    assert len(pool._idle) == 2
    with pytest.raises(ConfigError, match=r"can be shared.*without eviction"):
        FusedCache(pool, 4).share(1)
