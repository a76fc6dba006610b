"""Cache-Craft: its limits, and its choice by the paper's equations over the attention that plain transformers gives."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from blend_oracle import blended_logits
from families import FAMILIES, assert_same, masks_of, oracle_logits, random_prompt

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import get_method

CHOSEN_ON = ["llama", "llama-yarn", "qwen3", "phi3-partial", "mixtral", "mistral-window", "gemma2", "gemma3", "smollm3"]
CHUNKS = (17, 3, 20, 12)
LAYERS = 3


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


@torch.no_grad()
def attention(oracle, prompt):
    """Layer 1's weights of a plain forward, summed over heads: float64 [num_tokens, num_tokens]."""
    mask = masks_of(oracle, causal(prompt.num_tokens))
    layers = oracle(input_ids=torch.tensor([prompt.ids]), attention_mask=mask, output_attentions=True).attentions
    return layers[1][0].double().sum(0).numpy()


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


def expected(weights, prompt, alpha):
    """The tokens of equation 14."""
    tokens = []
    for rank, ((start, end), impact) in enumerate(zip(spans(prompt), impacts(weights, prompt), strict=True)):
        first = spans(prompt)[0][0]
        inter = [weights[token, first:start].sum() for token in range(start, end)]
        count = min(end - start, math.ceil(alpha * impact * (end - start))) if rank else 0
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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_of_them_behind_the_prefix_is_full_prefill_and_none_is_reposition(load, family):
    """Law 3, with blocks that were read behind the prefix: the first chunk's is exact, and all others run again."""
    lm, oracle = load(family)
    prompt = random_prompt(118)
    every = rc.fuse(lm, prompt, "cachecraft", alpha=2, recipe="prefix")
    assert_same(every.next_logits, oracle_logits(oracle, prompt, causal(prompt.num_tokens)))
    none = rc.fuse(lm, prompt, "cachecraft", alpha=0)
    assert torch.equal(none.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(none.computed_tokens) == {len(prompt.suffix_ids)}


def test_what_the_blocks_were_read_behind_makes_no_difference_to_the_choice(load):
    """Layer 1 looks at what full prefill has there, whatever stands in the blocks."""
    lm, _ = load("llama")
    prompt = random_prompt(119, chunks=CHUNKS)
    near = [[random_prompt(120, chunks=(9,)).chunk_ids[0]]] * 4
    blocks = rc.encode(lm, prompt, rc.Recipe(neighbours=1), neighbours=near)
    over = rc.fuse(lm, prompt, "cachecraft", blocks)
    assert over.computed_tokens == rc.fuse(lm, prompt, "cachecraft").computed_tokens


@pytest.mark.parametrize("alpha", [-0.01, 2.01, math.nan, math.inf, "0.5", None, True])
def test_what_is_no_alpha_is_refused(alpha):
    with pytest.raises(ConfigError, match=r"alpha is .*from 0 \(nothing runs again\) to 2"):
        get_method("cachecraft", alpha=alpha)
