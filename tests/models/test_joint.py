"""Tokens of several requests in one pass, over own caches or a shared context: logits of plain transformers."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from covering import few
from families import (
    FAMILIES,
    assert_same,
    block_diagonal,
    causal_logits,
    ids_of,
    oracle_logits,
    random_prompt,
    saved_tiny,
    tiny,
)
from waiting import WAIT_S, model_held, until

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.kv.buffers import BufferPool
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.kv.fused_cache import FusedCache
from ragcache.models.attention import CURRENT
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling

DIVERSE = (
    "llama",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "gpt_neox",
    "cohere",
    "smollm3",
    "mistral-window",
)


def run_of(ids, start, cache):
    return ForwardRequest(torch.tensor(ids), torch.arange(start, start + len(ids)), cache, ordered=True)


@pytest.mark.parametrize("family", few(DIVERSE, sorted(set(FAMILIES) - set(DIVERSE))))
def test_a_joint_pass_equals_separate_plain_forwards(family):
    """Requests of unlike lengths: one decodes a single token, two go on behind what they hold, one begins."""
    lm, oracle = tiny(family)
    texts = [ids_of(31, 1), ids_of(23, 2), ids_of(40, 3), ids_of(7, 4)]
    held = [30, 12, 35, 0]
    caches = [lm.new_cache(64) for _ in texts]
    for ids, count, cache in zip(texts, held, caches, strict=True):
        if count:
            lm.run(ids[:count], 0, cache)
    rows = zip(texts, held, caches, strict=True)
    pieces = [ScheduledTokens.next(run_of(ids[count:], count, cache), len(ids) - count) for ids, count, cache in rows]
    found = run_pieces(lm.model, pieces)
    assert CURRENT.get() is None
    for ids, cache, logits in zip(texts, caches, found, strict=True):
        assert_same(logits, causal_logits(oracle, ids))
        assert set(cache.lengths) == set(cache.computed_tokens) == {len(ids)}


@pytest.mark.parametrize("family", DIVERSE)
def test_the_suffix_of_one_joins_the_decoding_of_others(family):
    """`reposition` under its block-diagonal mask beside plain decoding: blocks are placed within the joint pass."""
    lm, oracle = tiny(family)
    prompt = random_prompt(5)
    decoding, cache = ids_of(26, 6), lm.new_cache(40)
    lm.run(decoding[:-1], 0, cache)
    suffixes = [Captured(lm, prompt, ratio) for ratio in ("reposition", "full")]
    pieces = [ScheduledTokens.next(run_of(decoding[-1:], 25, cache), 1)]
    pieces += [ScheduledTokens.next(one.run, one.run.left) for one in suffixes]
    step, moved, read = run_pieces(lm.model, pieces)
    assert_same(step, causal_logits(oracle, decoding))
    assert_same(moved, oracle_logits(oracle, prompt, block_diagonal(prompt)))
    assert_same(read, causal_logits(oracle, prompt.ids))


class Captured:
    """The run that a method asks for, caught before it runs."""

    def __init__(self, lm, prompt, method):
        self.run: ForwardRequest | None = None
        scheduler = lm.scheduler
        prefix = lm.read(prompt.prefix_ids) if method != "full" else None
        original = scheduler.run

        def catch(run, alone=None):
            self.run = run
            raise _CaughtError

        scheduler.run = catch
        try:
            blocks = rc.encode(lm, prompt) if method != "full" else None
            rc.fuse(lm, prompt, method, blocks, exact=prefix)
        except _CaughtError:
            pass
        finally:
            scheduler.run = original


class _CaughtError(Exception):
    pass


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "cohere2"])
@pytest.mark.parametrize("size", [1, 7, 16])
def test_a_run_in_pieces_equals_one_plain_forward(family, size):
    lm, oracle = tiny(family)
    ids = ids_of(45, 7)
    run = run_of(ids, 0, lm.new_cache(64))
    while run.left:
        piece = ScheduledTokens.next(run, min(size, run.left))
        (logits,) = run_pieces(lm.model, [piece])
        piece.end()
    assert_same(logits, causal_logits(oracle, ids))
    assert set(run.cache.computed_tokens) == {45}


def test_a_failed_piece_leaves_the_cache_as_it_was():
    """Also where the pass stopped between two layers, and where it placed the context."""
    lm, oracle = tiny("llama")
    one = Captured(lm, prompt := random_prompt(8), "reposition").run
    piece = ScheduledTokens.next(one, one.left)
    layers = lm.model.model.layers

    def fail(*_args):
        raise RuntimeError("out of memory")

    with layers[1].register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="out of memory"):
        run_pieces(lm.model, [piece])
    assert one.cache.computed_tokens[0] == len(prompt.suffix_ids)
    piece.undo()
    assert set(one.cache.computed_tokens) == {0}
    assert_same(run_pieces(lm.model, [piece])[0], oracle_logits(oracle, prompt, block_diagonal(prompt)))
    assert set(one.cache.lengths) == {prompt.num_tokens}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_joint_pass_that_fails_midway_appends_nothing(error):
    """Its first layer has appended when the second fails: each is then run alone, over what its cache held before."""
    lm, oracle = tiny("llama")
    texts = [ids_of(11 + 5 * number, 20 + number) for number in range(3)]
    caches = [lm.new_cache(64) for _ in texts]
    for ids, cache in zip(texts, caches, strict=True):
        lm.run(ids[:-1], 0, cache)
    passes = []

    def fail_once(_module, args):
        passes.append(args[0].shape[1])
        if len(passes) == 1:
            raise error("midway")

    with lm.model.model.layers[1].register_forward_pre_hook(fail_once):
        with ThreadPoolExecutor(4) as pool, model_held(lm, pool):
            jobs = []
            for ids, cache in zip(texts, caches, strict=True):
                jobs.append(pool.submit(lm.run, ids[-1:], len(ids) - 1, cache))
                until(lambda: lm.scheduler.waiting == len(jobs))
        found = [job.result(WAIT_S) for job in jobs]
    assert passes[0] == len(texts), "they shared the pass that failed"
    for ids, cache, logits in zip(texts, caches, found, strict=True):
        assert_same(logits, causal_logits(oracle, ids))
        assert set(cache.lengths) == set(cache.computed_tokens) == {len(ids)}


METHODS = ("reposition", "full", "cacheblend", "epic", "ape", "concat", "samkv")


@pytest.mark.parametrize("family", few(["llama", "gpt_oss", "mixtral"], ["gemma2", "gemma3", "gpt_neox", "cohere"]))
def test_eight_threads_get_what_one_gets(family):
    """Law 7: other questions, other methods, at the same time; token ids as one after another."""
    lm, _ = tiny(family)
    methods = [name for name in METHODS if _reads(lm, name)]
    work = [(random_prompt(seed, suffix=3 + seed), methods[seed % len(methods)], 2 + seed) for seed in range(8)]

    def answer(one):
        prompt, method, tokens = one
        fused = rc.fuse(lm, prompt, method)
        steps = decode(lm, fused.cache, fused.next_logits, fused.next_position, Sampling(max_tokens=tokens))
        return fused.next_logits, list(steps)

    alone = [answer(one) for one in work]
    before = passes_of_three(lm)
    with ThreadPoolExecutor(9) as pool:
        with model_held(lm, pool):
            jobs = [pool.submit(answer, one) for one in work]
            until(lambda: lm.scheduler.waiting == len(work))
        together = [job.result(WAIT_S) for job in jobs]
    for (logits, ids), (expected, expected_ids) in zip(together, alone, strict=True):
        assert_same(logits, expected)
        assert ids == expected_ids
    assert passes_of_three(lm) > before, "they shared passes"


def passes_of_three(lm):
    """Passes so far that held three requests or more."""
    return sum(count for members, count in lm.scheduler.stats().members.items() if members >= 3)


def _reads(lm, method):
    try:
        rc.fuse(lm, random_prompt(0), method)
    except rc.RagCacheError:
        return False
    return True


# Caches that stand on one shared context.


SHARING = ("llama", "gemma2", "gemma3", "gpt_oss", "mixtral", "gpt_neox", "smollm3", "mistral-window", "cohere2")
SHARING += ("deepseek_v2", "deepseek_v3")
CONTEXT = 31


def context_of(lm, ids, behind=()):
    """A shared context of these tokens, and the cache that it came from, which goes on behind it."""
    owner = lm.new_cache(CONTEXT + 20)
    lm.run([*ids, *behind], 0, owner)
    return owner.share(len(ids)), owner


@pytest.mark.parametrize("family", SHARING)
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
    with pytest.raises(ConfigError, match=r"can be shared.*by a method that drops no token"):
        FusedCache(pool, 4).share(1)
