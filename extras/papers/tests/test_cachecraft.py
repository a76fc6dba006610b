"""Cache-Craft: its limits, and its choice by the paper's equations over the attention that plain transformers gives."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from blend_oracle import blended_logits, forward, recorded_kv
from families import FAMILIES, assert_same, block_diagonal, causal, random_prompt
from paper_oracles import CHOSEN_ON, CHUNKS, LAYERS

import ragcache as rc
from ragcache.fusion import get_method
from ragcache_papers.anchors import Scope


def attention(oracle, prompt):
    """Layer 1's weights of a plain forward, summed over heads: float64 [num_tokens, num_tokens]."""
    return forward(oracle, prompt.ids, causal(prompt.num_tokens))[2][1][0].double().sum(0).numpy()


def spans(prompt):
    starts = np.cumsum([len(prompt.prefix_ids), *map(len, prompt.chunk_ids)])
    return list(pairwise(starts))


def impacts(weights, prompt):
    """CCI by chunk: equations 3, 4 and 9 to 11, one number at a time."""
    found = []
    for rank, (start, end) in enumerate(spans(prompt)):
        size = end - start
        a = sum(weights[start:end, i:j].sum() / (size * (j - i)) for i, j in spans(prompt)[:rank])
        b = weights[start:end, start:end].sum() / size**2
        found.append(1 / (1 + math.exp(-a / b)))
    return found


def expected(weights, prompt, alpha, overlaps=(0.0, 0.0, 0.0, 0.0)):
    """The tokens of equation 14; of nothing overlapped the block alone."""
    tokens = []
    for rank, ((start, end), impact) in enumerate(zip(spans(prompt), impacts(weights, prompt), strict=True)):
        first = spans(prompt)[0][0]
        inter = [weights[token, first:start].sum() for token in range(start, end)]
        share = alpha * impact * (1 - overlaps[rank])
        count = min(end - start, math.ceil(share * (end - start) - 1e-9)) if rank else 0
        order = sorted(range(end - start), key=lambda place: (-inter[place], place))
        tokens += [int(start) + place for place in order[:count]]
    return sorted(tokens)


@pytest.mark.parametrize("family", CHOSEN_ON)
@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_chunks_run_again_as_far_as_they_lean_on_others(load, family, alpha):
    lm, oracle = load(family)
    prompt = random_prompt(111, prefix=6, chunks=CHUNKS)
    chosen = expected(attention(oracle, prompt), prompt, alpha)
    fused = rc.fuse(lm, prompt, "cachecraft", alpha=alpha)
    suffix = list(range(prompt.context_tokens, prompt.num_tokens))
    every = list(range(len(prompt.prefix_ids), prompt.num_tokens))
    by_layer = [torch.tensor(every), *[torch.tensor(chosen + suffix)] * (LAYERS - 1)]
    assert_same(fused.next_logits, blended_logits(oracle, prompt, by_layer))
    # Projecting all tokens counts as layer 1's work, as for cacheblend.
    assert fused.computed_tokens == (len(every), len(every), len(chosen + suffix))


def test_chunks_of_one_size_run_different_shares(load):
    """One ratio for all would run other tokens, and as many of each chunk."""
    lm, oracle = load("llama")
    differ = 0
    for seed in range(112, 118):
        prompt = random_prompt(seed, prefix=3, chunks=(40, 40, 40, 40))
        tokens = expected(attention(oracle, prompt), prompt, 1.0)
        counts = [sum(start <= token < end for token in tokens) for start, end in spans(prompt)]
        assert counts[0] == 0
        assert all(20 <= count <= 40 for count in counts[1:])
        differ += len(set(counts[1:])) > 1
        fused = rc.fuse(lm, prompt, "cachecraft", alpha=1.0)
        assert fused.computed_tokens[-1] == len(tokens) + len(prompt.suffix_ids)
    assert differ, "no prompt tells the chunks apart"


def test_what_the_blocks_were_read_behind_makes_no_difference_to_the_choice(load):
    """Layer 1 looks at what full prefill has there, whatever stands in the blocks."""
    lm, _ = load("llama")
    prompt = random_prompt(119, chunks=CHUNKS)
    near = [[random_prompt(120, chunks=(9,)).chunk_ids[0]]] * 4
    blocks = rc.encode(lm, prompt, rc.Recipe(neighbours=1), neighbours=near)
    over = rc.fuse(lm, prompt, "cachecraft", blocks)
    assert over.computed_tokens == rc.fuse(lm, prompt, "cachecraft").computed_tokens


# Variants

EQUAL = (15, 15, 15, 15)


def seen(weights, prompt, rank):
    """Attention of the chunk at `rank` to each one before it, by its ids."""
    start, end = spans(prompt)[rank]
    return {
        tuple(ids): weights[start:end, i:j].sum()
        for ids, (i, j) in zip(prompt.chunk_ids[:rank], spans(prompt)[:rank], strict=True)
    }


def overlap(then, now):
    """Equations 6 to 8 over attention to chunks by name, and what was not seen then."""
    shared = [name for name in then if name in now]
    pairs = list(combinations(shared, 2))
    order = list(now)
    turned = sum(order.index(one) > order.index(two) for one, two in pairs)
    beta = sum(then[name] for name in shared) / sum(then.values())
    return beta * (1 - turned / max(1, len(pairs))) * sum(now[name] for name in shared) / sum(now.values())


def read_first(oracle, prompt, alpha):
    """KV as the method leaves it over blocks: what a variant is cut from."""
    chosen = expected(attention(oracle, prompt), prompt, alpha)
    every, suffix = range(prompt.num_tokens), list(range(prompt.context_tokens, prompt.num_tokens))
    by_layer = [torch.tensor([*every][len(prompt.prefix_ids) :]), *[torch.tensor(chosen + suffix)] * (LAYERS - 1)]
    apart = recorded_kv(oracle, prompt, block_diagonal(prompt))
    return forward(oracle, prompt.ids, causal(prompt.num_tokens), apart, by_layer)[1]


@pytest.mark.parametrize("family", [name for name in CHOSEN_ON if name not in {"mistral-window", "gemma3"}])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_variant_is_placed_and_runs_less_the_more_it_overlaps(load, family, swapped):
    """The second chunk is another, or the first two change places; those behind them stand where they stood. Through a
    small window in layer 1 they would not see so far."""
    lm, oracle = load(family)
    first, alpha = random_prompt(121, prefix=6, chunks=EQUAL), 0.9
    one, two, *rest = first.chunk_ids
    changed = [two, one] if swapped else [one, random_prompt(122, chunks=EQUAL).chunk_ids[0]]
    second = replace(first, chunk_ids=[*changed, *rest])
    method = get_method("cachecraft", alpha=alpha, max_variants=2)
    rc.fuse(lm, first, method)
    fused = rc.fuse(lm, second, method)

    then, now = attention(oracle, first), attention(oracle, second)
    overlaps = [0.0, 0.0, *(overlap(seen(then, first, rank), seen(now, second, rank)) for rank in (2, 3))]
    assert swapped == (overlaps[2] == 0)
    assert 0 < overlaps[3] < 1
    before, left = recorded_kv(oracle, second, block_diagonal(second)), read_first(oracle, first, alpha)
    for rank in (2, 3):
        where = slice(*spans(second)[rank])
        for layer in range(LAYERS):
            for own, variant in zip(before[layer], left[layer], strict=True):
                own[:, :, where] = variant[:, :, where] if overlaps[rank] else own[:, :, where]
    chosen = expected(now, second, alpha, overlaps)
    suffix = list(range(second.context_tokens, second.num_tokens))
    every = list(range(len(second.prefix_ids), second.num_tokens))
    by_layer = [torch.tensor(every), *[torch.tensor(chosen + suffix)] * (LAYERS - 1)]
    assert_same(fused.next_logits, blended_logits(oracle, second, by_layer, before))
    assert fused.computed_tokens[-1] == len(chosen + suffix)
    assert len(chosen) < len(expected(now, second, alpha)), "a variant runs less than a block does"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_behind_the_same_chunks_nothing_runs_again(load, family):
    """And what stands in the cache is what the first prompt left there, however often that is."""
    lm, _ = load(family)
    prompt = random_prompt(123, chunks=CHUNKS)
    method = get_method("cachecraft", max_variants=1)
    first = rc.fuse(lm, prompt, method)
    for ids in ([7, 8, 9], [10, 11]):
        again = rc.fuse(lm, replace(prompt, suffix_ids=ids), method)
        assert set(again.computed_tokens) == {len(ids)}
        for layer in range(lm.num_layers):
            for found, left in zip(again.cache.layer_state(layer)[:2], first.cache.layer_state(layer)[:2], strict=True):
                assert_same(found[:, :, : prompt.context_tokens], left[:, :, : prompt.context_tokens])


def test_variants_belong_to_a_scope_and_a_prefix_and_none_are_kept_unless_asked_for(load):
    lm, _ = load("llama")
    prompt = random_prompt(124, chunks=CHUNKS)
    method = get_method("cachecraft", max_variants=1)
    one, other = Scope(), Scope()
    alone = rc.fuse(lm, prompt, method, scope=one).computed_tokens
    assert rc.fuse(lm, prompt, method, scope=other).computed_tokens == alone
    assert rc.fuse(lm, prompt, method).computed_tokens == alone
    behind = replace(prompt, prefix_ids=[*prompt.prefix_ids[:-1], 9])
    assert max(rc.fuse(lm, behind, method, scope=one).computed_tokens) == max(alone)
    assert max(rc.fuse(lm, prompt, method, scope=one).computed_tokens) == len(prompt.suffix_ids)
    without = get_method("cachecraft")
    assert not without.remembers
    assert [rc.fuse(lm, prompt, without).computed_tokens for _ in range(2)] == [alone] * 2
    assert without.pool.num_bytes == 0


def test_the_nearest_of_several_is_taken_and_a_new_one_makes_room(load):
    lm, _ = load("llama")
    prompt = random_prompt(125, chunks=EQUAL)
    a, b, c, d = prompt.chunk_ids
    for most, runs in ((1, True), (2, False)):
        method = get_method("cachecraft", alpha=1.0, max_variants=most)
        for chunks in ([a, b, d], [a, c, d]):
            rc.fuse(lm, replace(prompt, chunk_ids=chunks), method)
        fused = rc.fuse(lm, replace(prompt, chunk_ids=[a, b, d]), method)
        assert (max(fused.computed_tokens) > len(prompt.suffix_ids)) == runs
