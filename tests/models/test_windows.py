"""Sliding windows at their edge: contexts one token shorter than the window, as long, and longer, on every path."""

import pytest
import torch
from families import FAMILIES, assert_same, block_diagonal, causal_logits, ids_of, oracle_logits, tiny

import ragcache as rc
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces

WINDOWED = ("mistral-window", "gemma2", "gpt_oss")
EDGE = (-1, 0, 1, 2)  # tokens that a context has more than the window


@pytest.fixture(params=WINDOWED)
def model(request):
    """Ours, plain transformers', and the window."""
    return *tiny(request.param), FAMILIES[request.param][1]["sliding_window"]


def test_the_oracle_masks_as_transformers_itself_does(model):
    _, oracle, window = model
    for more in EDGE:
        ids = ids_of(window + more)
        with torch.no_grad():
            assert_same(causal_logits(oracle, ids), oracle(input_ids=torch.tensor([ids])).logits[0, -1])


@pytest.mark.parametrize("more", EDGE)
def test_prefill(model, more):
    lm, oracle, window = model
    ids = ids_of(window + more, more + 5)
    assert_same(lm.run(ids, 0, lm.new_cache(32)), causal_logits(oracle, ids))


@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_and_suffixes_over_the_edge(model, rows):
    """So many tokens a pass, from before the window is full until it has moved on."""
    lm, oracle, window = model
    ids = ids_of(window + 2 + rows, rows)
    cache, start = lm.new_cache(32), window - 2
    lm.run(ids[:start], 0, cache)
    while start < len(ids):
        piece = ids[start : start + rows]
        logits = lm.run(piece, start, cache)
        start += len(piece)
        assert_same(logits, causal_logits(oracle, ids[:start]))


@pytest.mark.parametrize("rows", [1, 3])
def test_joint_passes(model, rows):
    """Requests on both sides of the edge in one pass."""
    lm, oracle, window = model
    texts = [ids_of(window + more, 10 + more) for more in EDGE]
    pieces = []
    for ids in texts:
        cache, start = lm.new_cache(32), len(ids) - rows
        lm.run(ids[:start], 0, cache)
        run = ForwardRequest(torch.tensor(ids[start:]), torch.arange(start, len(ids)), cache, ordered=True)
        pieces.append(ScheduledTokens.next(run, rows))
    for ids, logits in zip(texts, run_pieces(lm.model, pieces), strict=True):
        assert_same(logits, causal_logits(oracle, ids))


@pytest.mark.parametrize("more", EDGE)
def test_chunks_read_alone(model, more):
    lm, oracle, window = model
    prompt = rc.Prompt([], [ids_of(4, 1), ids_of(window + more, 2)], ids_of(2, 3))
    fused = rc.fuse(lm, prompt, "reposition", rc.encode(lm, prompt))
    assert_same(fused.next_logits, oracle_logits(oracle, prompt, block_diagonal(prompt)))


@pytest.mark.parametrize("more", EDGE)
def test_a_chunk_behind_its_prefix(model, more):
    """The window reaches from the chunk into the prefix, or ends right behind it."""
    lm, oracle, window = model
    prompt = rc.Prompt(ids_of(4, 1), [ids_of(window + more - 4, 2)], ids_of(2, 3))
    fused = rc.fuse(lm, prompt, "reposition", recipe="prefix")
    assert_same(fused.next_logits, causal_logits(oracle, prompt.ids))
