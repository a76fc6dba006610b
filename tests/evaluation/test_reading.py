"""One pass over an answer says whether it would be written, and what its tokens' logits are."""

from __future__ import annotations

import pytest
import torch
from families import load_tiny, random_prompt

import ragcache as rc
from benchmarks.quality_units import would_write
from ragcache.evaluation.reading import forced_logits
from ragcache.models.decoding import decode
from ragcache.models.sampling import Sampling

LENGTH = 6


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt_oss", "mixtral"])
def model(request, tmp_path_factory):
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("method", ["full", "epic", "ape"])
def test_the_greedy_answer_and_no_other_would_be_written(model, method):
    lm, _ = model
    fused = rc.fuse(lm, random_prompt(3), method=method)
    held = list(fused.cache.lengths)
    logits = fused.next_logits
    written = list(
        decode(lm, fused.cache, logits, fused.next_position, Sampling(max_tokens=LENGTH), eos_ids=frozenset())
    )
    fused = rc.fuse(lm, random_prompt(3), method=method)
    assert would_write(lm, fused, written)
    for place in range(LENGTH):
        other = [*written]
        other[place] = (other[place] + 1) % lm.vocab_size
        assert not would_write(lm, fused, other)
    assert list(fused.cache.lengths) == held


def test_forced_logits_are_a_plain_forward_over_prompt_and_answer(model):
    lm, oracle = model
    prompt, answer = random_prompt(4), [7, 11, 5]
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([[*prompt.ids, *answer]])).logits[0, prompt.num_tokens - 1 : -1]
    got = forced_logits(lm, rc.fuse(lm, prompt, method="full"), answer)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
