"""Law 1 over every causal family of the installed transformers, also those that read images: exact, or refused."""

import copy
import math
import statistics
from collections import defaultdict

import pytest
import torch
from causal_families import IMAGE_FAMILIES, UNBUILT, causal_config, causal_model
from families import assert_same, block_diagonal, layout, linked, logits_under, random_prompt
from model_table import EVERY, outcome, row_of, written
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import ragcache as rc
from ragcache.models import attention, layerwise

# What must not be lost: a change that makes the probes refuse everything would pass all else.
EXACT = {
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "mimo_v2_flash",
    "phi3", "glm4", "ministral3", "granite_swa", "granitemoe_swa", "llama4_text", "deepseek_v2", "deepseek_v3",
    "glm4_moe_lite", "minicpm3", "youtu", "axk1", "qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba",
    "nemotron_h", "olmo_hybrid", "falcon_h1", "lfm2", "lfm2_moe",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(EVERY) - set(UNBUILT)))
def test_a_family_is_exact_by_every_recipe_or_refused_as_the_docs_say(family, tmp_path):
    found = outcome(family, tmp_path)
    assert family not in EXACT or found.startswith("exact"), found
    assert written()[family] == row_of(family, found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", sorted(name for name, what in written().items() if what.startswith("exact")))
def test_an_exact_family_is_within_the_rounding_of_16_bits(family, dtype, tmp_path):
    """Twice what plain transformers in that dtype is away from float32, over the same prompts."""
    causal_model(family).save_pretrained(tmp_path)
    kind = AutoModelForImageTextToText if family in IMAGE_FAMILIES else AutoModelForCausalLM
    plain = kind.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
    exact, lm = copy.deepcopy(plain).float(), rc.load_lm(tmp_path, dtype=dtype)
    away = defaultdict(list)
    for seed in range(4):
        prompt = random_prompt(seed, prefix=6, chunks=(7, 13, 4))
        alone = rc.Prompt(prompt.prefix_ids, prompt.chunk_ids[1:2], prompt.suffix_ids)
        truth = logits_under(exact, alone.ids)
        away["plain"].append(distance(logits_under(plain, alone.ids), truth))
        away["behind the prefix"].append(distance(rc.fuse(lm, alone, "reposition", recipe="prefix").next_logits, truth))
        if not lm.shape.states:
            masked = logits_under(exact, prompt.ids, block_diagonal(prompt))
            away["plain, masked"].append(distance(logits_under(plain, prompt.ids, block_diagonal(prompt)), masked))
            away["isolated"].append(distance(rc.fuse(lm, prompt, "reposition", recipe="isolated").next_logits, masked))
    if not all(map(math.isfinite, away["plain"])):
        pytest.skip(f"random weights of {family} are too large for {dtype} in plain transformers too")
    assert is_within(away["behind the prefix"], away["plain"])
    assert lm.shape.states or is_within(away["isolated"], away["plain, masked"])


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(name for name, what in written().items() if what.startswith("exact")))
def test_an_exact_family_keeps_the_laws_of_methods_or_refuses_them(family, tmp_path):
    """Laws 3 to 5; what a recurrent state cannot take part in is refused by name."""
    causal_model(family).save_pretrained(tmp_path)
    kind = AutoModelForImageTextToText if family in IMAGE_FAMILIES else AutoModelForCausalLM
    plain, lm = kind.from_pretrained(tmp_path, attn_implementation="eager").float().eval(), rc.load_lm(tmp_path)
    prompt, links = random_prompt(5, prefix=6, chunks=(7, 13, 4)), [[101, 102], [], [7]]
    shifted, overlapping, _ = layout(prompt)
    laws = {
        "cacheblend": [({"ratio": 1.0}, (prompt.ids,)), ({"ratio": 0.0}, (prompt.ids, block_diagonal(prompt)))],
        "link": [
            ({"link_ids": links}, linked(prompt, links)),
            ({"link_tokens": 0}, (prompt.ids, block_diagonal(prompt))),
        ],
        "ape": [({"temperature": 1, "scale": 1}, (prompt.ids, overlapping, shifted))],
    }
    for method, cases in laws.items():
        for options, forward in cases:
            if lm.shape.states:
                with pytest.raises(rc.RagCacheError, match=method):
                    rc.fuse(lm, prompt, method, **options)
            else:
                assert_same(rc.fuse(lm, prompt, method, **options).next_logits, logits_under(plain, *forward))


def is_within(ours, plain):
    """By the mean; or by the median, where rounding gave a token of one prompt to another expert."""
    return any(middle(ours) <= 2 * middle(plain) for middle in (statistics.mean, statistics.median))


def distance(ours, theirs):
    return float((ours.float() - theirs).norm() / theirs.norm())


def test_the_docs_list_every_family():
    said = written()
    assert set(said) == set(EVERY)
    assert {name for name, what in said.items() if what.startswith("not tried")} == set(UNBUILT)
    assert all(said[name].startswith("exact") for name in EXACT)


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


def test_what_no_probe_of_short_prompts_or_whole_passes_shows_is_refused(tmp_path):
    """Its layers pass on four hidden states a token."""
    causal_model("gemma3n_text").save_pretrained(tmp_path)
    with pytest.raises(rc.UnsupportedModelError, match="layers cannot run some of the tokens alone"):
        rc.load_lm(tmp_path)


def test_layers_that_take_more_by_token_than_is_narrowed_are_refused(tmp_path, monkeypatch):
    """Recompute methods would run a chosen token with another one's input."""
    causal_model("gemma4_text").save_pretrained(tmp_path)
    assert len(set(rc.load_lm(tmp_path).shape.layers)) == 2
    monkeypatch.setattr(layerwise, "BY_TOKEN", tuple(set(layerwise.BY_TOKEN) - {"per_layer_input"}))
    with pytest.raises(rc.UnsupportedModelError, match="layers cannot run some of the tokens alone"):
        rc.load_lm(tmp_path)


# Checkpoints of models that read images, as they are published: vision tower, projector and all.


KINDS = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",  # Mistral Small
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}

TOWER = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def checkpoint(request, tmp_path_factory):
    """A directory, and the whole model that plain transformers makes of it."""
    torch.manual_seed(0)
    config = causal_config(request.param)
    if config.vision_config is None:  # Gemma 4, whose small configuration leaves it out
        config = type(config)(text_config=config.text_config.to_dict(), vision_config=TOWER)
    whole = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for weight in whole.parameters():
            weight.normal_(0.0, 0.3) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
    directory = tmp_path_factory.mktemp(request.param)
    whole.save_pretrained(directory)
    oracle = AutoModelForImageTextToText.from_pretrained(directory, dtype="float32", attn_implementation="eager")
    assert type(oracle).__name__ == KINDS[request.param]
    assert any("visual" in name or "vision" in name for name, _ in oracle.named_parameters())
    return directory, oracle.eval()


def test_the_text_part_of_a_model_that_reads_images_is_exact(checkpoint):
    directory, oracle = checkpoint
    lm = rc.load_lm(directory)
    prompt = random_prompt(1, prefix=6, chunks=(7, 13, 4))
    assert_same(rc.fuse(lm, prompt, "full").next_logits, logits_under(oracle, prompt.ids))
    if not lm.shape.states:  # no mask keeps a state out
        apart = logits_under(oracle, prompt.ids, block_diagonal(prompt))
        assert_same(rc.fuse(lm, prompt, "reposition", recipe="isolated").next_logits, apart)
    alone = rc.Prompt(prompt.prefix_ids, prompt.chunk_ids[1:2], prompt.suffix_ids)
    fused = rc.fuse(lm, alone, "reposition", recipe="prefix")
    assert_same(fused.next_logits, logits_under(oracle, alone.ids))
    assert max(fused.computed_tokens) == len(prompt.suffix_ids)
