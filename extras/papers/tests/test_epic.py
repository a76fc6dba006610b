"""EPIC: both edges of the chunks, bad input, limits; first tokens alone, of all families: test_recompute.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from blend_oracle import blended_logits
from families import assert_same, load_tiny, oracle_logits, random_prompt, save_tiny

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import get_method
from ragcache.fusion.layout import NO_ADDITIONS, Span, lay_out
from ragcache_vllm.request_layout import RequestLayout

EDGES = [(0, 3), (2, 3), (4, 5), (7, 9), (0, 99), (99, 2), (5, 0)]


def edge_tokens(prompt, first, last):
    """By chunk: its tokens that are among its first or its last ones; none of the first chunk."""
    tokens, start = [], len(prompt.prefix_ids)
    for rank, chunk in enumerate(prompt.chunk_ids):
        places = range(len(chunk)) if rank else ()
        tokens.append([start + place for place in places if place < first or place >= len(chunk) - last])
        start += len(chunk)
    return tokens


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize(("first", "last"), EDGES)
def test_the_edges_of_all_chunks_but_the_first_run(load, family, first, last):
    lm, oracle = load(family)
    prompt = random_prompt(53)
    running = [token for tokens in edge_tokens(prompt, first, last) for token in tokens]
    suffix = list(range(prompt.context_tokens, prompt.num_tokens))
    fused = rc.fuse(lm, prompt, "epic", first_tokens=first, last_tokens=last)
    assert_same(fused.next_logits, blended_logits(oracle, prompt, [torch.tensor(running + suffix)] * 3))
    assert set(fused.computed_tokens) == {len(running) + len(suffix)}


@pytest.mark.parametrize(("first", "last"), EDGES)
def test_another_engine_is_told_of_both_edges_in_one_span_where_they_meet(first, last):
    prompt = random_prompt(54)
    layout = lay_out(prompt.parts, rc.Recipe(), NO_ADDITIONS)
    spans = get_method("epic", first_tokens=first, last_tokens=last).reruns(layout)
    told = iter(spans)
    for tokens in edge_tokens(prompt, first, last):
        pieces = 1 + sum(b > a + 1 for a, b in pairwise(tokens)) if tokens else 0
        assert [token for _ in range(pieces) for token in range(*next(told))] == tokens
    assert next(told, None) is None
    blocks = tuple(Span(piece.start, piece.end) for piece in layout.placed())
    assert RequestLayout(blocks, tuple(spans)).runs == tuple(spans)


def test_unless_asked_the_first_tokens_run_alone():
    layout = lay_out(random_prompt(55, prefix=5, chunks=(40, 30, 8)).parts, rc.Recipe(), NO_ADDITIONS)
    assert get_method("epic").reruns(layout) == [Span(45, 61), Span(75, 83)]


@pytest.mark.parametrize("option", ["first_tokens", "last_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "16", None, True])
def test_what_is_no_count_is_refused(option, value):
    with pytest.raises(ConfigError, match=rf"{option} is .*0 or more"):
        get_method("epic", **{option: value})


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral", "mistral-window", "gemma2"])
def test_no_token_is_reposition_and_all_of_them_behind_a_first_chunk_that_saw_the_prefix_are_full(family, tmp_path):
    """Law 3 as far as it can hold: the first chunk keeps its own keys, which are exact behind the prefix."""
    lm, oracle = load_tiny(family, tmp_path)
    prompt = random_prompt(51)
    n = prompt.num_tokens
    every = rc.fuse(lm, prompt, "epic", first_tokens=99, recipe="prefix").next_logits
    plain = oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril())
    torch.testing.assert_close(every / plain.abs().max(), plain / plain.abs().max(), atol=2e-5, rtol=0)
    none = rc.fuse(lm, prompt, "epic", first_tokens=0)
    assert torch.equal(none.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(none.computed_tokens) == {len(prompt.suffix_ids)}


def test_with_one_chunk_there_is_nothing_to_run(tmp_path):
    lm = rc.load_lm(save_tiny("llama", str(tmp_path)))
    prompt = random_prompt(52, chunks=(9,))
    assert set(rc.fuse(lm, prompt, "epic").computed_tokens) == {len(prompt.suffix_ids)}
