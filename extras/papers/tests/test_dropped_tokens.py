"""Methods of papers over less than all tokens: what eviction keeps of what they hold, and blocks that keep a share."""

from functools import partial

import pytest
import torch
from ape_formula import merged
from families import METHOD_FAMILIES, assert_same, block_diagonal, layout, random_prompt
from formula_oracle import (
    ANSWER,
    CHUNKS,
    LAYERS,
    Family,
    Plan,
    assert_kept,
    expected,
    held_tokens,
    planned_logits,
    step_by_step,
    with_answer,
    without_dropped,
)  # fmt: skip
from kit.makers import each

import ragcache as rc
from ragcache.kv.block_key import Recipe

family = each(METHOD_FAMILIES, Family)


def test_a3_votes_with_what_ran_again(family):
    """Tokens that A3 takes up in layer 1 run through layer 0 after the suffix: they have no vote."""
    prompt = random_prompt(64, prefix=6, chunks=CHUNKS, suffix=5)
    context = prompt.context_tokens
    apart = Plan(block_diagonal(prompt), torch.arange(prompt.num_tokens))
    planned_logits(family.formula, prompt.ids, apart)
    drawn = apart.weights[1][0, :, context:, 6:context].sum((0, 1))
    order = sorted(range(len(drawn)), key=lambda i: (-float(drawn[i]), i))
    again = {6 + place for place in order[: round(0.3 * len(drawn))]}
    old = torch.tensor([token not in again for token in range(context)])

    def change(layer, keys, values):
        def replaced(new, recorded):
            new = new.clone()
            new[:, :, :context][:, :, old] = recorded[:, :, :context][:, :, old]
            return new

        recorded = apart.kv[layer]
        return replaced(keys, recorded[0]), replaced(values, recorded[1])

    def plan_of(count):
        n = prompt.num_tokens + count
        return Plan(torch.ones(n, n, dtype=torch.bool).tril(), torch.arange(n), change=change)

    tokens = list(range(6, context))
    logits, kept = expected(family.formula, prompt.ids, plan_of, tokens, 5, rc.SnapKV(13))
    fused = rc.fuse(family.lm, prompt, "a3", ratio=0.3, evict=13)
    assert_kept(fused, kept, range(6), range(context, prompt.num_tokens))
    assert_same(step_by_step(family.lm, fused, ANSWER), logits, atol=3e-5)


def test_ape_weighs_what_is_left(family):
    """Chunks share positions, and the weight of the chunks is taken over those of their tokens that are kept."""
    prompt = random_prompt(65, prefix=4, chunks=CHUNKS, suffix=5)

    def plan_of(count):
        positions, allowed, of_chunks = layout(prompt, ANSWER[:count])
        weigh = partial(merged, of_chunks=of_chunks, context_tokens=prompt.context_tokens, temperature=0.7, scale=0.8)
        return Plan(allowed, positions, weigh)

    tokens = list(range(4, prompt.context_tokens))
    logits, _ = expected(family.formula, prompt.ids, plan_of, tokens, 5, rc.SnapKV(13))
    fused = rc.fuse(family.lm, prompt, "ape", temperature=0.7, scale=0.8, evict=13)
    assert_same(step_by_step(family.lm, fused, ANSWER), logits, atol=3e-5)
    assert set(fused.kept_tokens) == {4 + 13 + 5}


def test_layers_that_hold_different_tokens(family):
    """What samkv holds in each layer is its own matter (test_samkv.py); eviction chooses among that."""
    prompt = random_prompt(66, prefix=4, chunks=CHUNKS, suffix=5)
    options = {"block_size": 2, "local_blocks": 1, "top_p": 0.5, "cross_filter": False, "recompute": "none"}
    context = prompt.context_tokens
    whole = rc.fuse(family.lm, prompt, "samkv", **options)
    held = [[token for token in held_tokens(whole, layer)[0] if token < context] for layer in range(LAYERS)]
    assert held[0] != held[1]

    def plan_of(count):
        allowed = []
        for tokens in held:
            mask = with_answer(block_diagonal(prompt), count)
            mask[context:, [token for token in range(context) if token not in tokens]] = False
            allowed.append(mask)
        return Plan(allowed, torch.arange(prompt.num_tokens + count))

    tokens = [[token for token in layer if token >= 4] for layer in held]
    logits, kept = expected(family.formula, prompt.ids, plan_of, tokens, 5, rc.SnapKV(10))
    fused = rc.fuse(family.lm, prompt, "samkv", evict=10, **options)
    assert_kept(fused, kept, range(4), range(context, prompt.num_tokens))
    assert_same(step_by_step(family.lm, fused, ANSWER), logits, atol=3e-5)


@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.7, 0.8)])
def test_ape_weighs_what_blocks_keep(family, temperature, scale):
    prompt = random_prompt(74, prefix=6, chunks=CHUNKS, suffix=5)
    recipe = Recipe("prefix", kept=0.4)
    positions, allowed, of_chunks = layout(prompt, ANSWER)
    blocks = rc.encode(family.lm, prompt, recipe)
    masks = without_dropped(family.lm, allowed, blocks, prompt, prompt.context_tokens)
    weigh = None
    if (temperature, scale) != (1, 1):

        def weigh(scores, visible, sinks):
            return merged(scores, visible, sinks, of_chunks=of_chunks, context_tokens=prompt.context_tokens,
                          temperature=temperature, scale=scale)  # fmt: skip

    plan = Plan(masks, positions, weigh)
    logits = planned_logits(family.formula, [*prompt.ids, *ANSWER], plan)[prompt.num_tokens - 1 :]
    fused = rc.fuse(family.lm, prompt, "ape", blocks, temperature=temperature, scale=scale)
    assert_same(step_by_step(family.lm, fused, ANSWER), logits, atol=3e-5)
