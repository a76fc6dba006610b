"""APE against attention in two parts merged by weight (laws 2 and 5)."""

from functools import partial

import pytest
from ape_formula import merged
from families import METHOD_FAMILIES, layout, random_prompt, tiny
from formula_oracle import CHUNKS, Plan, planned_logits, step_by_step, without_dropped
from kit.makers import each
from paper_oracles import assert_like, with_formula

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.kv.block_key import Recipe

ANSWER = [5, 77, 31]


family = each(METHOD_FAMILIES, with_formula, scope="module")


def weighing(prompt, of_chunks, temperature, scale):
    """Return APE's weights; None where it is neutral: the usual softmax over all tokens."""
    if (temperature, scale) == (1, 1):
        return None
    return partial(
        merged, of_chunks=of_chunks, context_tokens=prompt.context_tokens, temperature=temperature, scale=scale
    )


@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.9, 0.9), (0.3, 0.6), (1.0, 0.5), (0.7, 1.4)])
def test_ape_is_attention_in_two_parts_also_while_decoding(family, temperature, scale):
    lm, oracle = family
    prompt = random_prompt(11, prefix=4)
    positions, allowed, of_chunks = layout(prompt, ANSWER)
    weigh = weighing(prompt, of_chunks, temperature, scale)
    expected = planned_logits(oracle, [*prompt.ids, *ANSWER], Plan(allowed, positions, weigh))
    fused = rc.fuse(lm, prompt, method="ape", temperature=temperature, scale=scale)
    assert_like(step_by_step(lm, fused, ANSWER), expected[prompt.num_tokens - 1 :])
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.7, 0.8)])
def test_ape_weighs_what_blocks_keep(family, temperature, scale):
    lm, oracle = family
    prompt = random_prompt(74, prefix=6, chunks=CHUNKS, suffix=5)
    recipe = Recipe("prefix", kept=0.4)
    positions, allowed, of_chunks = layout(prompt, ANSWER)
    blocks = rc.encode(lm, prompt, recipe)
    masks = without_dropped(lm, allowed, blocks, prompt, prompt.context_tokens)
    weigh = weighing(prompt, of_chunks, temperature, scale)
    logits = planned_logits(oracle, [*prompt.ids, *ANSWER], Plan(masks, positions, weigh))[prompt.num_tokens - 1 :]
    fused = rc.fuse(lm, prompt, "ape", blocks, temperature=temperature, scale=scale)
    assert_like(step_by_step(lm, fused, ANSWER), logits)


def test_blocks_that_saw_no_prefix_are_refused():
    lm, prompt = tiny("llama")[0], random_prompt(14)
    with pytest.raises(ConfigError, match="prefix"):
        rc.fuse(lm, prompt, method="ape", blocks=rc.encode(lm, prompt))
