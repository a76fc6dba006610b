"""EPIC: both edges of the chunks, bad input, limits; its runner in all families: tests/fusion/test_recompute.py."""

from itertools import pairwise

import pytest
import torch
from blend_oracle import blended_logits
from covering import covering
from families import assert_same, load_tiny, oracle_logits, random_prompt

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import get_method
from ragcache.fusion.layout import NO_ADDITIONS, Span, lay_out
from ragcache_vllm.request_layout import RequestLayout

EDGES = [(0, 3), (2, 3), (4, 5), (7, 9), (0, 99), (99, 2), (5, 0)]


def edge_tokens(prompt, first, last):
    """By chunk: its tokens that are among its first or its last ones; none of a chunk that nothing precedes."""
    tokens, start = [], len(prompt.prefix_ids)
    for chunk in prompt.chunk_ids:
        places = range(len(chunk)) if start else ()
        tokens.append([start + place for place in places if place < first or place >= len(chunk) - last])
        start += len(chunk)
    return tokens


@pytest.mark.parametrize(
    ("family", "edges", "prefix"), covering(["llama", "gemma2", "mixtral"], EDGES, [0, 1, 5], together=[(1, 2)])
)
def test_the_edges_of_all_chunks_that_something_precedes_run(load, family, edges, prefix):
    first, last = edges
    lm, oracle = load(family)
    prompt = random_prompt(53, prefix)
    running = [token for tokens in edge_tokens(prompt, first, last) for token in tokens]
    suffix = list(range(prompt.context_tokens, prompt.num_tokens))
    fused = rc.fuse(lm, prompt, "epic", first_tokens=first, last_tokens=last)
    assert_same(fused.next_logits, blended_logits(oracle, prompt, [torch.tensor(running + suffix)] * 3))
    assert set(fused.computed_tokens) == {len(running) + len(suffix)}


@pytest.mark.parametrize(("first", "last"), EDGES)
@pytest.mark.parametrize("prefix", [0, 5])
def test_another_engine_is_told_of_both_edges_in_one_span_where_they_meet(first, last, prefix):
    prompt = random_prompt(54, prefix)
    layout = lay_out(prompt.parts, rc.Recipe(), NO_ADDITIONS)
    spans = get_method("epic", first_tokens=first, last_tokens=last).reruns(layout)
    told = iter(spans)
    for tokens in edge_tokens(prompt, first, last):
        pieces = 1 + sum(b > a + 1 for a, b in pairwise(tokens)) if tokens else 0
        assert [token for _ in range(pieces) for token in range(*next(told))] == tokens
    assert next(told, None) is None
    blocks = tuple(Span(piece.start, piece.end) for piece in layout.placed())
    assert RequestLayout(blocks, tuple(spans)).runs == tuple(spans)


@pytest.mark.parametrize(
    ("recipe", "prefix", "label", "is_exact"),
    [
        (rc.Recipe(), 5, 0, False),
        (rc.Recipe(), 1, 0, False),  # a BOS alone stands before it all the same
        (rc.Recipe(), 0, 0, True),
        (rc.Recipe(), 0, 2, False),
        (rc.Recipe("prefix"), 5, 0, True),
        (rc.Recipe("prefix"), 5, 2, False),
        (rc.Recipe(bos=True), 1, 0, False),  # which token its own BOS was is not known here
        (rc.Recipe(neighbours=1), 0, 0, False),
        (rc.Recipe("prefix", neighbours=1), 5, 0, False),
    ],
    ids=str,
)
def test_a_first_chunk_read_behind_just_what_precedes_it_is_left_out(recipe, prefix, label, is_exact):
    """Unless asked the first 16 tokens run alone."""
    prompt = random_prompt(55, prefix, chunks=(40, 30, 8))
    prompt = rc.Prompt(prompt.prefix_ids, prompt.chunk_ids, prompt.suffix_ids, [[7] * label, (), ()])
    start = prefix + label
    others = [Span(start + 40, start + 56), Span(start + 70, start + 78)]
    found = get_method("epic").reruns(lay_out(prompt.parts, recipe, NO_ADDITIONS))
    assert found == (others if is_exact else [Span(start, start + 16), *others])


@pytest.mark.parametrize("option", ["first_tokens", "last_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "16", None, True])
def test_what_is_no_count_is_refused(option, value):
    with pytest.raises(ConfigError, match=rf"{option} is .*0 or more"):
        get_method("epic", **{option: value})


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral", "mistral-window", "gemma2"])
def test_no_token_is_reposition_and_all_of_them_are_full_prefill(family, tmp_path):
    """Law 3, over blocks of every recipe."""
    lm, oracle = load_tiny(family, tmp_path)
    for prefix in (0, 1, 5):
        prompt = random_prompt(51, prefix)
        n, near = prompt.num_tokens, [[prompt.chunk_ids[-1]], [], [[9, 8]], []]
        plain = oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril())
        for recipe in (rc.Recipe(), rc.Recipe("prefix"), rc.Recipe(bos=True), rc.Recipe(neighbours=1)):
            blocks = rc.encode(lm, prompt, recipe, neighbours=near if recipe.neighbours else None)
            every = rc.fuse(lm, prompt, "epic", blocks, recipe=recipe, first_tokens=99)
            assert_same(every.next_logits, plain)
            is_exact = recipe.sees_prefix or (recipe == rc.Recipe() and not prefix)
            assert set(every.computed_tokens) == {n - prefix - (len(prompt.chunk_ids[0]) if is_exact else 0)}
    none = rc.fuse(lm, prompt, "epic", first_tokens=0)
    assert torch.equal(none.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(none.computed_tokens) == {len(prompt.suffix_ids)}
