"""Boundary tokens: the first and last tokens of a chunk always run again, and scores choose the rest."""

import numpy as np
import pytest
import test_a3
import test_prophet
import torch
from blend_oracle import blended_logits, most_deviating
from families import assert_same, random_prompt
from paper_oracles import CHUNKS, expected_logits

import ragcache as rc
from ragcache.fusion.recompute import chosen

CHOOSING = ["cacheblend", "a3", "prophet"]
EDGES = [(4, 0), (0, 3), (2, 3)]


def boundary(prompt, first_tokens, last_tokens, recipe="isolated"):
    tokens, start = [], len(prompt.prefix_ids)
    for rank, chunk in enumerate(prompt.chunk_ids):
        edge = [place for place in range(len(chunk)) if place < first_tokens or place >= len(chunk) - last_tokens]
        tokens += [start + place for place in edge if rank or (start and recipe == "isolated")]
        start += len(chunk)
    return tokens


def edges(first_tokens, last_tokens):
    """Return the options for boundary tokens of a method."""
    return {"boundary_tokens": first_tokens, "tail_tokens": last_tokens}


def ranked(method, oracle, prompt):
    """Return the chunk tokens in the order of the method's own test, the best first."""
    if method == "prophet":
        return test_prophet.ranked(prompt, test_prophet.attention(oracle, prompt)[1])
    scores = test_a3.scores(oracle, prompt)
    return sorted(scores, key=lambda token: (-scores[token], token))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-window"])
@pytest.mark.parametrize("method", ["a3", "prophet"])
@pytest.mark.parametrize("edge", EDGES)
def test_they_run_before_the_best_of_the_others(load, method, family, edge):
    """Boundary tokens count in the share."""
    lm, oracle = load(family)
    prompt, count = random_prompt(71, prefix=5, chunks=CHUNKS), 20
    always = boundary(prompt, *edge)
    others = [token for token in ranked(method, oracle, prompt) if token not in always]
    fused = rc.fuse(lm, prompt, method, ratio=count / sum(CHUNKS), **edges(*edge))
    assert_same(fused.next_logits, expected_logits(oracle, prompt, always + others[: count - len(always)]))
    stages = 2 if method == "prophet" else 1
    assert set(fused.computed_tokens) == {count + stages * len(prompt.suffix_ids)}


@pytest.mark.parametrize("gradual", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("edge", EDGES)
def test_they_deviate_first(load, family, gradual, edge):
    lm, oracle = load(family)
    prompt, total = random_prompt(72, prefix=5, chunks=CHUNKS), sum(CHUNKS)
    shares = (1.25 * 0.4, 0.75 * 0.4) if gradual else (0.4, 0.4)
    always = boundary(prompt, *edge)
    counts = [total, *(max(round(share * total), len(always)) for share in shares)]
    expected = most_deviating(oracle, prompt, counts, always)
    fused = rc.fuse(lm, prompt, "cacheblend", ratio=0.4, gradual=gradual, **edges(*edge))
    assert_same(fused.next_logits, blended_logits(oracle, prompt, expected))


@pytest.mark.parametrize("recipe", ["isolated", "prefix"])
@pytest.mark.parametrize("ratio", [0, 0.05])
@pytest.mark.parametrize("method", CHOOSING)
@pytest.mark.parametrize("edge", [(5, 0), (3, 2)])
def test_more_than_the_share_they_run_all_the_same_as_by_epic(load, method, ratio, recipe, edge):
    """This holds for blocks of both recipes: with `prefix`, the shared prefix is every chunk's attention sink."""
    lm, _ = load("qwen3")
    prompt = random_prompt(73, prefix=5, chunks=CHUNKS)
    fused = rc.fuse(lm, prompt, method, ratio=ratio, recipe=recipe, **edges(*edge))
    by_epic = rc.fuse(lm, prompt, "epic", first_tokens=edge[0], last_tokens=edge[1], recipe=recipe)
    assert_same(fused.next_logits, by_epic.next_logits)
    running = 5 * (recipe == "isolated") + 3 + 5 + 5
    assert fused.computed_tokens[-1] == by_epic.computed_tokens[-1] == running + len(prompt.suffix_ids)


@pytest.mark.parametrize("method", CHOOSING)
def test_a_lone_chunk_has_none_where_its_kv_is_exact(load, method):
    lm, _ = load("llama")
    for prefix, recipe in ((0, "isolated"), (5, "prefix"), (5, "isolated")):
        prompt = random_prompt(74, prefix, chunks=(9,))
        alone = rc.fuse(lm, prompt, method, ratio=0, recipe=recipe, **edges(5, 4)).next_logits
        assert_same(alone, rc.fuse(lm, prompt, "full").next_logits)
        is_moved = torch.equal(alone, rc.fuse(lm, prompt, recipe=recipe).next_logits)
        assert is_moved == (not boundary(prompt, 5, 4, recipe))


def test_the_choice_is_numpys():
    generator = np.random.default_rng(0)
    for _ in range(50):
        size = int(generator.integers(1, 30))
        slots = np.sort(generator.choice(100, size, replace=False))
        scores = generator.integers(0, 5, size).astype(np.float32)  # many are equal
        always = np.sort(generator.choice(slots, int(generator.integers(0, size + 1)), replace=False))
        count = int(generator.integers(0, size + 1))
        order = np.lexsort((np.arange(size), -scores, ~np.isin(slots, always)))
        expected = np.sort(slots[order[: max(count, len(always))]])
        found = chosen(torch.tensor(scores), torch.tensor(slots), count, torch.tensor(always))
        assert found.tolist() == expected.tolist()
