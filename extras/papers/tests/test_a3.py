"""A3: law 3, and the chosen tokens against attention weights of plain transformers."""

import pytest
import torch
from families import assert_same, block_diagonal, masks_of, random_prompt
from paper_oracles import CHOSEN_ON, CHUNKS, expected_logits

import ragcache as rc
from ragcache.models import attention


@torch.no_grad()
def scores(oracle, prompt):
    """Return each chunk token's score: its column of layer 1's attention weights, summed over the suffix's rows and
    heads.

    In a block-diagonal forward pass, the suffix sees the chunks as they were read alone.
    """
    mask = masks_of(oracle, block_diagonal(prompt))
    weights = oracle(input_ids=torch.tensor([prompt.ids]), attention_mask=mask, output_attentions=True).attentions[1][0]
    suffix = range(prompt.context_tokens, prompt.num_tokens)
    return {
        token: sum(float(head[row, token]) for head in weights for row in suffix)
        for token in range(len(prompt.prefix_ids), prompt.context_tokens)
    }


def highest(scores, count):
    return sorted(sorted(scores, key=lambda token: (-scores[token], token))[:count])


@pytest.mark.parametrize("family", CHOSEN_ON)
@pytest.mark.parametrize("ratio", [0.15, 0.6])
def test_the_tokens_that_the_suffix_attends_to_run(load, family, ratio):
    """In a sliding layer most tokens get exactly no attention; of these, the first are taken."""
    lm, oracle = load(family)
    prompt = random_prompt(41, prefix=6, chunks=CHUNKS)
    count = round(ratio * sum(CHUNKS))
    chosen = highest(scores(oracle, prompt), count)
    fused = rc.fuse(lm, prompt, "a3", ratio=ratio)
    assert_same(fused.next_logits, expected_logits(oracle, prompt, chosen))
    assert set(fused.computed_tokens) == {count + len(prompt.suffix_ids)}
    assert set(fused.cache.lengths) == {prompt.num_tokens}


@pytest.mark.parametrize(("pool", "count", "seeds"), [(5, 20, [42]), (11, 8, range(60, 64))])
def test_neighbours_are_averaged_where_asked(load, pool, count, seeds):
    """At the ends, the mean is over the neighbours that exist: if absent neighbours counted as zeros, or the prefix as
    a neighbour, other tokens would be chosen.
    """
    lm, oracle = load("llama")
    zeros_differ = False
    for seed in seeds:
        prompt = random_prompt(seed, prefix=3, chunks=CHUNKS)
        alone = scores(oracle, prompt)
        near = {token: [alone[other] for other in alone if abs(other - token) <= pool // 2] for token in alone}
        chosen = highest({token: sum(values) / len(values) for token, values in near.items()}, count)
        assert chosen != highest(alone, count)
        zeros_differ |= chosen != highest({token: sum(values) / pool for token, values in near.items()}, count)
        fused = rc.fuse(lm, prompt, "a3", ratio=count / sum(CHUNKS), pool_tokens=pool)
        assert_same(fused.next_logits, expected_logits(oracle, prompt, chosen))
    assert zeros_differ or pool < 11, "no prompt tells the two apart"


def test_a_long_suffix_is_scored_a_few_rows_at_a_time(load, monkeypatch):
    lm, _ = load("gemma2")
    prompt = random_prompt(43, chunks=CHUNKS, suffix=40)
    at_once = rc.fuse(lm, prompt, "a3", ratio=0.3).next_logits
    seen = []
    weights = attention.attention_weights
    monkeypatch.setattr(attention, "attention_weights", lambda *args: seen.append(weights(*args)) or seen[-1])
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 4 * prompt.num_tokens * 7)
    assert_same(rc.fuse(lm, prompt, "a3", ratio=0.3).next_logits, at_once)
    assert sum(part.shape[3] == 7 and part.shape[4] == prompt.num_tokens for part in seen) == 5
