"""Every path of the attention function against softmax written out in NumPy; sliding windows at their edge, on every
path, with contexts one token shorter than the window, as long, and longer."""

import numpy as np
import pytest
import torch
from families import FAMILIES, assert_same, block_diagonal, causal, causal_logits, ids_of, oracle_logits, tiny
from torch.nn.attention.bias import causal_lower_right

import ragcache as rc
from ragcache.models.attention_kernels import (
    Scoring,
    additive,
    attend,
    attend_explicitly,
    attend_last,
    attend_part,
    visible,
)
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces


def by_hand(query, key, value, allowed, scaling, softcap=None, sinks=None):
    """Head by head, row by row, in float64."""
    query, key, value = (t.double().numpy() for t in (query, key, value))
    batch, heads, rows, _ = query.shape
    out = np.zeros((batch, heads, rows, value.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // key.shape[1])
            for r in range(rows):
                scores = key[b, kv] @ query[b, h, r] * scaling
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                scores = np.where(allowed[r], scores, -np.inf)
                top = scores.max()
                weights = np.exp(scores - top)
                extra = np.exp(sinks[h] - top) if sinks is not None else 0.0
                out[b, h, r] = weights @ value[b, kv] / (weights.sum() + extra)
    return out


def inputs(rows, length, heads=6, kv_heads=2, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows * 100 + length)
    shapes = ((2, heads, rows, width), (2, kv_heads, length, width), (2, kv_heads, length, width))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "length", "window"), [(5, 5, None), (3, 30, None), (3, 30, 7), (1, 30, None), (4, 9, 3)]
)
def test_masked_grouped_attention(rows, length, window, dtype):
    query, key, value = inputs(rows, length, dtype=dtype)
    allowed = visible(torch.arange(length - rows, length), torch.arange(length), window)
    for row, key_place in np.ndindex(rows, length):
        distance = length - rows + row - key_place
        assert allowed[row, key_place] == (0 <= distance < (window or length))
    expected = by_hand(query, key, value, allowed.numpy(), 0.3)
    got = attend(query, key, value, additive(allowed, dtype), False, Scoring(0.3))
    np.testing.assert_allclose(got.float().numpy(), expected, atol=1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("rows", "length"), [(1, 40), (5, 61), (20, 40), (7, 7)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_half_precision_costs_no_more_than_its_rounding(rows, length, batch, dtype, softcap):
    """Whole numbers and a scaling that half precision holds exactly: weights and the result alone are rounded. One
    per cent more or less in the scores is seen."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randint(-2, 3, (batch, 6, rows, 8), generator=generator)
    key = torch.randint(-2, 3, (batch, 2, length, 8), generator=generator)
    value = torch.randn((batch, 2, length, 8), generator=generator)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    allowed = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    expected, magnitude = (
        by_hand(query, key, one, allowed.numpy(), 0.5, softcap=softcap) for one in (value, value.abs())
    )
    scoring = Scoring(0.5, softcap)
    got = [attend(query, key, value, additive(allowed, dtype), False, scoring)]
    got += [attend_last(query, key, value, scoring).complete(None, dtype)]
    got += [attend(query, key, value, None, True, scoring)] if rows == length else []
    for one in got:
        error = np.abs(one.double().numpy() - expected)
        assert (error / magnitude).max() < 4 * torch.finfo(dtype).eps
        assert error.mean() < 0.5 * torch.finfo(dtype).eps * magnitude.mean()


@pytest.mark.parametrize("hidden", ["none", "the last columns", "anywhere", "by KV head"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_few_rows_in_half_precision(rows, hidden):
    """One request's rows over a part of a larger tensor, as caches hold keys and values."""
    length, dtype = 61, torch.bfloat16
    query, key, value = (tensor[:1] for tensor in inputs(rows, length + 9, dtype=dtype))
    key, value = key[:, :, :length], value[:, :, :length]
    generator = torch.Generator().manual_seed(rows)
    allowed = torch.ones(2, rows, length, dtype=torch.bool)
    if hidden == "the last columns":
        allowed[..., -rows:] = torch.ones(rows, rows, dtype=torch.bool).tril()
    elif hidden != "none":
        allowed[..., 3:] = torch.rand(2, rows, length - 3, generator=generator) < 0.6
    if hidden != "by KV head":
        allowed[1] = allowed[0]
    mask = additive(allowed if hidden == "by KV head" else allowed[0], dtype)
    got = attend(query, key, value, None if hidden == "none" else mask, False, Scoring(0.3))
    for kv_head in range(2):
        heads = slice(3 * kv_head, 3 * kv_head + 3)
        ours = by_hand(
            query[:, heads], key[:, kv_head : kv_head + 1], value[:, kv_head : kv_head + 1], allowed[kv_head], 0.3
        )
        np.testing.assert_allclose(got[:, heads].double().numpy(), ours, atol=0.03)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 4, 12])
def test_softcap_and_sinks(rows, softcap):
    query, key, value = inputs(rows, 12)
    allowed = visible(torch.arange(12 - rows, 12), torch.arange(12), None)
    sinks = torch.linspace(-1, 1, 6)
    expected = by_hand(query, key, value, allowed.numpy(), 0.5, softcap=softcap, sinks=sinks.numpy())
    scoring = Scoring(0.5, softcap, sinks)
    for got in (
        attend(query, key, value, additive(allowed, torch.float32), False, scoring),
        attend_last(query, key, value, scoring).complete(sinks, torch.float32),
    ):
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("width", [8, 5])
def test_parts_of_the_keys_merge_to_the_whole(width, softcap):
    """In three parts of 7, 9 and 4 keys, with values as wide as the keys, which a kernel computes, and narrower."""
    query, key, value = inputs(4, 20)
    value = value[..., :width]
    allowed = np.tril(np.ones((4, 20), dtype=bool), 16)
    scoring = Scoring(0.5, softcap)
    first = attend_part(query, key[:, :, :7], value[:, :, :7], False, scoring)
    merged = first.merge(attend_last(query, key[:, :, 7:], value[:, :, 7:], scoring)).complete(None, torch.float32)
    np.testing.assert_allclose(merged.numpy(), by_hand(query, key, value, allowed, 0.5, softcap), atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "length"), [(1, 20), (5, 21), (40, 47), (2, 3)])
def test_keys_are_cut_so_that_all_threads_have_as_much_to_do(rows, length, threads, monkeypatch):
    """Three KV heads are no multiple of two or eight threads; lengths are none of the pieces."""
    monkeypatch.setattr("ragcache.models.attention_kernels.LEAST_PIECE", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    query, key, value = (one[:1] for one in inputs(rows, length, heads=6, kv_heads=3))
    expected = by_hand(query, key, value, np.ones((rows, length), dtype=bool), 0.5)
    np.testing.assert_allclose(attend(query, key, value, None, False, Scoring(0.5)).numpy(), expected, atol=1e-5)
    first = attend_part(query, key[:, :, :2], value[:, :, :2], False, Scoring(0.5))
    whole = first.merge(attend_part(query, key[:, :, 2:], value[:, :, 2:], False, Scoring(0.5)))
    np.testing.assert_allclose(whole.complete(None, torch.float32).numpy(), expected, atol=1e-5)


def test_causal_paths_agree():
    """The bottom-right bias that CUDA takes, is_causal, and the explicit path."""
    query, key, value = inputs(6, 6)
    allowed = visible(torch.arange(6), torch.arange(6), None)
    expected = by_hand(query, key, value, allowed.numpy(), 0.4)
    for got in (
        attend(query, key, value, None, True, Scoring(0.4)),
        attend(query, key, value, causal_lower_right(6, 6), False, Scoring(0.4)),
        attend_explicitly(query, key, value, None, True, Scoring(0.4)),
    ):
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)
    shorter = attend(query[:, :, 4:], key, value, causal_lower_right(2, 6), False, Scoring(0.4))
    np.testing.assert_allclose(shorter.numpy(), expected[:, :, 4:], atol=1e-5)


def test_no_row_is_ever_empty():
    """A query that sees nothing would be NaN; masks are finite, so it is an average instead."""
    query, key, value = inputs(1, 4)
    nothing = additive(torch.zeros(1, 4, dtype=torch.bool), torch.float32)
    assert torch.isfinite(attend(query, key, value, nothing, False, Scoring(0.3))).all()


WINDOWED = ("mistral-window", "gemma2", "gpt_oss")
EDGE = (-1, 0, 1, 2)  # tokens that a context has more than the window


@pytest.fixture(params=WINDOWED)
def model(request):
    """Ours, plain transformers', and the window."""
    return *tiny(request.param), FAMILIES[request.param][1]["sliding_window"]


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
@pytest.mark.parametrize("recipe", ["isolated", "prefix"])
def test_chunks_over_the_edge(model, more, recipe):
    """Read alone; or behind a prefix, into which the window reaches from the chunk, or right behind which it ends."""
    lm, oracle, window = model
    if recipe == "isolated":
        prompt = rc.Prompt([], [ids_of(4, 1), ids_of(window + more, 2)], ids_of(2, 3))
    else:
        prompt = rc.Prompt(ids_of(4, 1), [ids_of(window + more - 4, 2)], ids_of(2, 3))
    allowed = block_diagonal(prompt) if recipe == "isolated" else causal(prompt.num_tokens)
    fused = rc.fuse(lm, prompt, "reposition", recipe=recipe)
    assert_same(fused.next_logits, oracle_logits(oracle, prompt, allowed))
