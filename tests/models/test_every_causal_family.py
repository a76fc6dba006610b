"""Law 1 over every causal family of the installed transformers: exact under every recipe, or refused by name."""

from __future__ import annotations

import inspect
import sys
import warnings

import pytest
import torch
from causal_families import CAUSAL_FAMILIES, UNBUILT, causal_model
from families import assert_same, block_diagonal, random_prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import ragcache as rc
from ragcache.models import attention, layerwise

# What must not be lost: a change that makes the probes refuse everything would pass all else.
EXACT = {
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "mimo_v2_flash",
    "phi3", "glm4", "qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba", "nemotron_h", "olmo_hybrid", "falcon_h1",
    "lfm2", "lfm2_moe",
}  # fmt: skip
LEAST_EFFECT = 1e-3  # of the mask on the logits, to be seen beside rounding


@pytest.fixture(params=sorted(set(CAUSAL_FAMILIES) - set(UNBUILT)))
def family(request, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a family's own code
        causal_model(request.param).save_pretrained(tmp_path)
        return request.param, tmp_path


@pytest.mark.slow
def test_a_family_is_exact_by_every_recipe_or_refused(family):
    name, directory = family
    try:
        lm = rc.load_lm(directory)
    except rc.UnsupportedModelError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert name not in EXACT, refusal
        assert "is not supported: " in refusal
        return
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = random_prompt(1, prefix=6, chunks=(7, 13, 4))
    joined = logits_of(oracle, prompt.ids)
    assert_same(rc.fuse(lm, prompt, method="full").next_logits, joined)
    if not lm.shape.states:  # no mask keeps a state out: those are checked in test_hybrids
        apart = logits_of(oracle, prompt.ids, block_diagonal(prompt))
        assert (apart - joined).abs().max() > LEAST_EFFECT * joined.abs().max(), (
            "this model cannot tell the masks apart"
        )
        isolated = rc.encode(lm, prompt, recipe="isolated")
        assert_same(rc.fuse(lm, prompt, method="reposition", blocks=isolated).next_logits, apart)
    for chunk, block in zip(prompt.chunk_ids, rc.encode(lm, prompt, recipe="prefix"), strict=True):
        alone = rc.Prompt(prompt.prefix_ids, [chunk], prompt.suffix_ids)
        fused = rc.fuse(lm, alone, method="reposition", blocks=[block], recipe="prefix")
        assert_same(fused.next_logits, logits_of(oracle, alone.ids))


def logits_of(model: PreTrainedModel, ids: list[int], allowed: Tensor | None = None) -> Tensor:
    """One plain forward of these ids, under a mask (bool [n, n]) where one is given; last token's logits."""
    mask = None
    if allowed is not None:
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]
        kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
        if kinds and "isinstance(causal_mask_mapping" in inspect.getsource(sys.modules[type(model).__module__]):
            mask = dict.fromkeys(kinds, mask)  # no window is as short as the prompt
    with torch.no_grad():
        at = torch.arange(len(ids))[None]
        return model(input_ids=torch.tensor([ids]), position_ids=at, attention_mask=mask).logits[0, -1].float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("recipe", ["isolated", "prefix"])
def test_a_recipe_that_does_not_give_the_models_own_keys_is_refused_at_load(tmp_path, monkeypatch, recipe, dtype):
    """An error that one recipe shows first: it attends to its values in another order."""
    honest = attention._encode_inputs

    def wrong(current, layer, query, key, value, window):
        is_wrong = current.rope is not None and (current.prefix or recipe == "isolated")
        return honest(current, layer, query, key, value.flip(2) if is_wrong else value, window)

    causal_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(attention, "_encode_inputs", wrong)
    with pytest.raises(rc.UnsupportedModelError, match=rf"layer 0's attention .*recipe {recipe}"):
        rc.load_lm(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["diffllama", "jetmoe"])
def test_a_model_that_changes_what_its_cache_gives_out_is_refused(tmp_path, name, dtype):
    causal_model(name).save_pretrained(tmp_path)
    with pytest.raises(rc.UnsupportedModelError, match=rf"\({name}\).* other keys or values than its cache gives"):
        rc.load_lm(tmp_path, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3n_text", "layers cannot run some of the tokens alone"),  # they pass on four hidden states a token
        ("ministral3", "queries grow with their position"),
        ("deepseek_v32", "latent attention keep a joint latent.*; layers of type indexed_attention keep a state"),
    ],
)
def test_what_no_probe_of_short_prompts_or_whole_passes_shows_is_refused(tmp_path, name, reason):
    causal_model(name).save_pretrained(tmp_path)
    with pytest.raises(rc.UnsupportedModelError, match=reason):
        rc.load_lm(tmp_path)


def test_layers_that_take_more_by_token_than_is_narrowed_are_refused(tmp_path, monkeypatch):
    """Recompute methods would run a chosen token with another one's input."""
    causal_model("gemma4_text").save_pretrained(tmp_path)
    assert len(set(rc.load_lm(tmp_path).shape.layers)) == 2
    monkeypatch.setattr(layerwise, "BY_TOKEN", tuple(set(layerwise.BY_TOKEN) - {"per_layer_input"}))
    with pytest.raises(rc.UnsupportedModelError, match="layers cannot run some of the tokens alone"):
        rc.load_lm(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma4_text", "gemma2", "mixtral", "qwen3_moe"])
def test_coarse_rounding_is_no_reason_to_refuse(tmp_path, name, dtype):
    causal_model(name).save_pretrained(tmp_path)
    assert rc.load_lm(tmp_path, dtype=dtype).shape.num_layers == 2
