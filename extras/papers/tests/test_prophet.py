"""ProphetKV: law 3, and the chosen tokens against attention weights of plain transformers in every layer."""

import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from families import assert_same, block_diagonal, masks_of, random_prompt
from paper_oracles import CHOSEN_ON, CHUNKS, LAYERS, expected_logits

import ragcache as rc
import ragcache_papers.prophet as prophet
from ragcache.errors import ConfigError
from ragcache.fusion.layout import Layout
from ragcache.fusion.method import PrefillRequest


@torch.no_grad()
def attention(oracle, prompt):
    """Return, by layer, the attention of the suffix's rows of all heads to the context: as the layer has it, and as
    shares of each row's sum.

    In a block-diagonal forward pass, the suffix sees the chunks as they were read alone. A row of a sliding layer may
    be too far from the context to attend to it.
    """
    mask, context = masks_of(oracle, block_diagonal(prompt)), prompt.context_tokens
    layers = oracle(input_ids=torch.tensor([prompt.ids]), attention_mask=mask, output_attentions=True).attentions
    own = [weights[0, :, context:, :context].reshape(-1, context).double().numpy() for weights in layers]
    given = [rows[rows.sum(1) > 0] for rows in own]
    return own, [rows / rows.sum(1, keepdims=True) for rows in given]


def scores(rows_by_layer):
    """Return each context token's attention, summed over all rows and layers."""
    return np.sum([rows.sum(0) for rows in rows_by_layer], axis=0)


def ranked(prompt, rows_by_layer):
    """Return the chunk tokens by score, the highest first; of equal scores the first token first."""
    by_token = scores(rows_by_layer)
    return sorted(range(len(prompt.prefix_ids), prompt.context_tokens), key=lambda token: (-by_token[token], token))


def with_scores(monkeypatch, lm, prompt, **options):
    """Return the output of `prophet`, and the scores that it chose tokens by."""
    seen, chosen = [], prophet.chosen
    monkeypatch.setattr(prophet, "chosen", lambda *args: seen.append(args[0].double().numpy()) or chosen(*args))
    return rc.fuse(lm, prompt, "prophet", **options), seen[0]


@pytest.mark.parametrize("family", CHOSEN_ON)
@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_the_tokens_that_the_suffix_attends_to_in_all_layers_run(load, monkeypatch, family, ratio):
    """The suffix runs twice, and both runs are counted."""
    lm, oracle = load(family)
    prompt = random_prompt(41, prefix=6, chunks=CHUNKS)
    count = round(ratio * sum(CHUNKS))
    shares = attention(oracle, prompt)[1]
    fused, found = with_scores(monkeypatch, lm, prompt, ratio=ratio)
    np.testing.assert_allclose(found, scores(shares)[6:], rtol=1e-3, atol=1e-4)
    chosen = ranked(prompt, shares)[:count]
    assert_same(fused.next_logits, expected_logits(oracle, prompt, chosen))
    assert set(fused.computed_tokens) == {count + 2 * len(prompt.suffix_ids)}
    assert set(fused.cache.lengths) == {prompt.num_tokens}


def test_neighbours_are_averaged_where_asked(load):
    lm, oracle = load("llama")
    prompt = random_prompt(43, prefix=3, chunks=CHUNKS)
    by_token, count = scores(attention(oracle, prompt)[1]), 20
    tokens = range(len(prompt.prefix_ids), prompt.context_tokens)
    near = {token: np.mean([by_token[other] for other in tokens if abs(other - token) <= 2]) for token in tokens}
    expected = sorted(tokens, key=lambda token: (-near[token], token))[:count]
    assert set(expected) != set(ranked(prompt, attention(oracle, prompt)[1])[:count])
    fused = rc.fuse(lm, prompt, "prophet", ratio=count / sum(CHUNKS), pool_tokens=5)
    assert_same(fused.next_logits, expected_logits(oracle, prompt, expected))


@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "gemma3"])
def test_rows_that_a_window_parts_from_the_context_say_nothing(load, monkeypatch, family):
    lm, oracle = load(family)
    prompt = random_prompt(43, prefix=6, chunks=CHUNKS, suffix=20)
    own, shares = attention(oracle, prompt)
    assert any(len(some) < len(every) for some, every in zip(shares, own, strict=True))
    fused, found = with_scores(monkeypatch, lm, prompt, ratio=0.1)
    np.testing.assert_allclose(found, scores(shares)[6:], rtol=1e-3, atol=1e-4)
    assert_same(fused.next_logits, expected_logits(oracle, prompt, ranked(prompt, shares)[:5]))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("layers", [[0], [1], [0, 2], (2, 1)])
def test_layers_that_are_named_score_alone(load, family, layers):
    """The first stage ends after the last of these layers."""
    lm, oracle = load(family)
    prompt = random_prompt(44, prefix=6, chunks=CHUNKS)
    shares, suffix = attention(oracle, prompt)[1], len(prompt.suffix_ids)
    chosen = ranked(prompt, [shares[layer] for layer in layers])[:10]
    fused = rc.fuse(lm, prompt, "prophet", ratio=10 / sum(CHUNKS), layers=layers)
    assert_same(fused.next_logits, expected_logits(oracle, prompt, chosen))
    passes = [2 if layer <= max(layers) else 1 for layer in range(LAYERS)]
    assert fused.computed_tokens == tuple(10 + times * suffix for times in passes)


def test_a_pass_that_ends_early_is_timed(load):
    lm, _ = load("llama")
    request = PrefillRequest(lm, Layout(()))
    with suppress(KeyError), request.running(lm.new_cache(1)):
        time.sleep(0.01)
        raise KeyError
    assert request.times.prefill_s >= 0.01


def test_a_layer_that_the_model_does_not_have_is_named(load):
    with pytest.raises(ConfigError, match=r"layers names layer 3; .* has layers 0 to 2"):
        rc.fuse(load("llama")[0], random_prompt(47), "prophet", layers=[1, 3])
