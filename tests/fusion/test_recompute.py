"""The layer-by-layer runner under recompute methods, and CacheBlend, against plain forwards with overridden KV."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from blend_oracle import blended_logits, most_deviating
from covering import covering
from families import METHOD_FAMILIES, assert_same, causal_logits, load_tiny, random_prompt

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import get_method
from ragcache.fusion.recompute import RecomputeMethod
from ragcache.models import attention


@dataclass(frozen=True)
class Scripted(RecomputeMethod):
    """Runs the slots that the test says, layer by layer."""

    script: tuple[tuple[int, ...], ...] = ()

    name: ClassVar[str] = "scripted"
    paper: ClassVar[str] = "none"
    summary: ClassVar[str] = "for tests"

    def candidates(self, context):
        return context.chunk_slots()

    def chooser(self, context):
        return lambda running: torch.tensor(self.script[running.layer], dtype=torch.int64)


def _script(lm, prompt, seed, shrinking):
    """Random slots in every layer, fewer and fewer going up; or none in layer 0 and some above."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(len(prompt.prefix_ids), prompt.context_tokens)
    rows = []
    for layer in range(lm.shape.num_layers):
        if shrinking or layer == 1:
            slots = slots[torch.rand(len(slots), generator=generator) < (1.0 if shrinking and layer == 0 else 0.6)]
        rows.append(tuple(slots.tolist()) if shrinking or layer else ())
    return tuple(rows)


def _chosen(prompt, script):
    suffix = torch.arange(prompt.context_tokens, prompt.num_tokens)
    return [torch.cat([torch.tensor(slots, dtype=torch.int64), suffix]) for slots in script]


@pytest.mark.parametrize("shrinking", [True, False], ids=["dropping", "taking-up"])
def test_tokens_that_run_are_a_forward_with_the_rest_overridden(family, shrinking):
    """Taken up in layer 1, tokens have run in layer 0 as well: its keys depend on no context."""
    lm, oracle = family
    prompt = random_prompt(11)
    script = _script(lm, prompt, 3, shrinking)
    fused = rc.fuse(lm, prompt, method=Scripted(script=script))
    assert_same(fused.next_logits, blended_logits(oracle, prompt, _chosen(prompt, script)))
    taken_up = script if shrinking else (script[1], *script[1:])
    assert fused.computed_tokens == tuple(len(slots) + len(prompt.suffix_ids) for slots in taken_up)
    assert set(fused.cache.lengths) == {prompt.num_tokens}


def test_probes_show_what_the_layer_would_have_used(family):
    """What a probe returns are the keys and values that the same pass then places; it leaves no trace."""
    lm, oracle = family
    prompt = random_prompt(14)
    seen = {}

    @dataclass(frozen=True)
    class Probing(Scripted):
        def chooser(self, context):
            def choose(running):
                seen[running.layer] = running.probe()

            return choose

    fused = rc.fuse(lm, prompt, method=Probing())
    plain = rc.fuse(lm, prompt, method="full").next_logits
    torch.testing.assert_close(fused.next_logits, plain, atol=1e-4, rtol=1e-4)
    first = len(prompt.prefix_ids)
    for layer, projected in seen.items():
        keys, values, _ = fused.cache.layer_state(layer)
        if hasattr(oracle.model.layers[layer].self_attn, "expand_kv"):  # a rotary key and a latent for all heads
            keys, values = oracle.model.layers[layer].self_attn.expand_kv(values, keys)
        torch.testing.assert_close(projected.key, keys[:, :, first:], atol=1e-5, rtol=0)
        torch.testing.assert_close(projected.value, values[:, :, first:], atol=1e-5, rtol=0)
        assert projected.query.shape[2] == prompt.num_tokens - first
    assert set(fused.computed_tokens) == {prompt.num_tokens - first}


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "smollm3"])
def test_rows_are_cut_into_spans_without_a_trace(name, tmp_path, monkeypatch):
    """More rows than share a mask: those that run are scattered, so every span ends at another key."""
    lm, oracle = load_tiny(name, tmp_path)
    prompt = random_prompt(16, chunks=(9, 21, 14))
    script = _script(lm, prompt, 5, True)
    monkeypatch.setattr(attention, "CPU_SPAN_ROWS", 4)
    cut = []
    spans = attention._spans
    monkeypatch.setattr(attention, "_spans", lambda *args: cut.append(spans(*args)) or cut[-1])
    fused = rc.fuse(lm, prompt, method=Scripted(script=script))
    assert_same(fused.next_logits, blended_logits(oracle, prompt, _chosen(prompt, script)))
    assert len(cut[0]) == -(-fused.computed_tokens[0] // 4)
    assert cut[0][0].num_keys < cut[0][-1].num_keys == prompt.num_tokens


# CacheBlend: law 3, and its choice against a plain forward that compares keys and values token by token.


CHOSEN_ON = ["llama", "qwen3", "phi3-partial", "mixtral", "mistral-window", "gemma2", "smollm3", "gpt_oss"]
CHUNKS = (17, 3, 20, 12)


@pytest.mark.parametrize(("family", "ratio"), covering(CHOSEN_ON, [0.15, 0.5]))
def test_the_most_deviating_tokens_run(load, family, ratio):
    lm, oracle = load(family)
    prompt = random_prompt(31, prefix=6, chunks=CHUNKS)
    count = round(ratio * sum(CHUNKS))
    expected = blended_logits(oracle, prompt, most_deviating(oracle, prompt, [sum(CHUNKS), count, count]))
    fused = rc.fuse(lm, prompt, "cacheblend", ratio=ratio)
    assert_same(fused.next_logits, expected)
    everyone, suffix = sum(CHUNKS) + len(prompt.suffix_ids), len(prompt.suffix_ids)
    assert fused.computed_tokens == (everyone, everyone, count + suffix)  # layer 1 projects all of them


@pytest.mark.parametrize("family", CHOSEN_ON)
def test_gradual_filtering_narrows_among_those_that_ran_below(load, family):
    lm, oracle = load(family)
    prompt = random_prompt(32, prefix=4, chunks=CHUNKS)
    total = sum(CHUNKS)
    counts = [total, round(1.25 * 0.4 * total), round(0.75 * 0.4 * total)]
    expected = blended_logits(oracle, prompt, most_deviating(oracle, prompt, counts))
    fused = rc.fuse(lm, prompt, "cacheblend", ratio=0.4, gradual=True)
    assert_same(fused.next_logits, expected)
    suffix = len(prompt.suffix_ids)
    assert fused.computed_tokens == (total + suffix, total + suffix, counts[1] + suffix)  # layer 2 projects layer 1's


def test_gradual_filtering_runs_the_ratio_on_average_and_never_more_than_all():
    class Shape:
        num_layers = 12

    class Context:
        chunk_tokens = (700, 300)
        lm = type("Model", (), {"shape": Shape})

    for ratio in (0.0, 0.16, 0.9, 1.0):
        counts = get_method("cacheblend", ratio=ratio, gradual=True)._counts(Context)
        assert counts[0] == 1000
        assert sum(counts[1:]) / 11 == pytest.approx(1000 * ratio, abs=0.5)
        assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(("family", "gradual"), covering(METHOD_FAMILIES, [False, True]))
def test_all_tokens_are_full_prefill_and_none_is_reposition(load, family, gradual):
    """Law 3. With none, it is the very same computation."""
    lm, oracle = load(family)
    prompt = random_prompt(33)
    every = rc.fuse(lm, prompt, "cacheblend", ratio=1, gradual=gradual)
    assert_same(every.next_logits, causal_logits(oracle, prompt.ids))
    none = rc.fuse(lm, prompt, "cacheblend", ratio=0, gradual=gradual)
    assert torch.equal(none.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert set(none.computed_tokens) == {len(prompt.suffix_ids)}


SHARES = [-0.01, 1.01, math.nan, math.inf, "0.5", None, True]
REFUSED = [*(("ratio", share, "from 0 to 1") for share in SHARES), ("gradual", 3, "choose True or False")]


@pytest.mark.parametrize(("option", "value", "said"), REFUSED)
def test_what_is_no_option_is_refused(option, value, said):
    with pytest.raises(ConfigError, match=rf"{option} is .*{said}"):
        get_method("cacheblend", **{option: value})
