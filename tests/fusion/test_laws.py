"""Laws 1 to 3 of fused prefill, in float32, against plain transformers under an explicit mask."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, assert_same, block_diagonal, oracle_logits, oracle_model, random_prompt, save_tiny

import ragcache as rc


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    directory = save_tiny(request.param, str(tmp_path_factory.mktemp(request.param)))
    return rc.load_lm(directory), oracle_model(directory)


@pytest.mark.parametrize("seed", range(3))
def test_reposition_is_one_block_diagonal_forward(family, seed):
    lm, oracle = family
    prompt = random_prompt(seed, prefix=seed * 3, chunks=(7, 13, 4, 9)[: seed + 2])
    fused = rc.fuse(lm, prompt, method="reposition", blocks=rc.encode(lm, prompt, recipe="isolated"))
    assert_same(fused.next_logits, oracle_logits(oracle, prompt, block_diagonal(prompt)))
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


def test_full_is_plain_transformers(family):
    lm, oracle = family
    prompt = random_prompt(5)
    n = prompt.num_tokens
    expected = oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril())
    assert_same(rc.fuse(lm, prompt, method="full").next_logits, expected)


# Methods that add trained tokens read another prompt: test_link.py and test_markers.py hold them to law 2.
UNTRAINED = sorted(row.name for row in rc.methods() if not row.needs_training)


@pytest.mark.parametrize("method", UNTRAINED)
def test_one_chunk_behind_the_prefix_is_full_prefill(family, method):
    lm, oracle = family
    prompt = random_prompt(7, prefix=6, chunks=(17,))
    n = prompt.num_tokens
    expected = oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril())
    fused = rc.fuse(lm, prompt, method=method, recipe="prefix")
    assert_same(fused.next_logits, expected)
