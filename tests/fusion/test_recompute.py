"""The layer-by-layer runner under recompute methods, against a plain forward with overridden keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from blend_oracle import blended_logits
from families import assert_same, load_tiny, oracle_logits, random_prompt, save_tiny

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


def test_all_tokens_from_layer_one_on_are_full_prefill(family):
    """Law 3 for tokens that stood aside in layer 0."""
    lm, oracle = family
    prompt = random_prompt(12)
    every = tuple(range(len(prompt.prefix_ids), prompt.context_tokens))
    fused = rc.fuse(lm, prompt, method=Scripted(script=((), *[every] * (lm.shape.num_layers - 1))))
    n = prompt.num_tokens
    assert_same(fused.next_logits, oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril()))


@pytest.mark.parametrize("first_tokens", [0, 1, 5, 100])
@pytest.mark.parametrize("prefix", [0, 5])
def test_epic_runs_the_first_tokens_of_all_chunks_that_something_precedes(family, first_tokens, prefix):
    lm, oracle = family
    prompt = random_prompt(13, prefix)
    slots, start = [], len(prompt.prefix_ids)
    for chunk in prompt.chunk_ids:
        slots += range(start, start + min(first_tokens, len(chunk))) if start else []
        start += len(chunk)
    fused = rc.fuse(lm, prompt, method="epic", first_tokens=first_tokens)
    script = [tuple(slots)] * lm.shape.num_layers
    assert_same(fused.next_logits, blended_logits(oracle, prompt, _chosen(prompt, script)))
    assert set(fused.computed_tokens) == {len(slots) + len(prompt.suffix_ids)}


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


def test_decoding_goes_on_over_blended_entries(tmp_path):
    """The cache that a recompute method leaves is the one its own logits were computed over."""
    lm = rc.load_lm(save_tiny("llama", str(tmp_path)))
    prompt = random_prompt(15)
    longer = rc.Prompt(prompt.prefix_ids, prompt.chunk_ids, [*prompt.suffix_ids, 9])
    fused = rc.fuse(lm, prompt, method="epic", first_tokens=3)
    stepped = lm.run([9], prompt.num_tokens, fused.cache)
    torch.testing.assert_close(stepped, rc.fuse(lm, longer, method="epic", first_tokens=3).next_logits)


def test_epic_refuses_negative_counts():
    with pytest.raises(ConfigError, match="first_tokens"):
        get_method("epic", first_tokens=-1)
