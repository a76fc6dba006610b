"""Multi-head latent attention: a block holds a rotary key and a latent, and every path makes the heads' KV of them."""

import pytest
import torch
from families import FAMILIES, assert_same, causal_logits, ids_of, tiny
from kit.makers import each
from transformers import DynamicCache

import ragcache as rc
from ragcache.kv.cache_shape import LayerShape
from ragcache.models.latent import ABSORBED, absorbed_of

LATENT = ("deepseek_v2", "deepseek_v3")


model = each(LATENT, tiny)


def test_a_block_is_what_plain_transformers_caches(model):
    """Latents as they are, rotary keys once they are at their places: [1, num_tokens, width] each."""
    lm, oracle = model
    size = FAMILIES["deepseek_v3"][1]
    ids, start = ids_of(9, 1), 23
    assert lm.shape.layers == (LayerShape(1, size["qk_rope_head_dim"], size["kv_lora_rank"]),) * 3
    block = rc.encode(lm, rc.Prompt([], [ids], [4]), recipe="isolated")[0]
    assert block.num_bytes == 3 * 9 * (size["qk_rope_head_dim"] + size["kv_lora_rank"]) * 4
    cache = DynamicCache()
    with torch.no_grad():
        oracle(input_ids=torch.tensor([ids]), position_ids=torch.arange(start, start + 9)[None], past_key_values=cache)
    for layer, held in enumerate(cache.layers):  # transformers hands the latent over as keys
        torch.testing.assert_close(block.layer_values(layer), held.keys[0], atol=1e-5, rtol=1e-4)
        rotated = lm.rope.rotate(block.layer_keys(layer), layer, start)
        torch.testing.assert_close(rotated, held.values[0], atol=1e-5, rtol=1e-4)


def parts_of(lm):
    return [module for module in lm.model.modules() if hasattr(module, ABSORBED)]


@pytest.mark.parametrize(("rows", "made"), [(1, 0), (10, 0), (11, 1)])
def test_few_rows_attend_to_latents_and_many_to_keys_that_are_made_of_them(model, rows, made):
    """For latents of 16 and heads of 6 + 8 and 10, making keys and values takes 16 * (6 + 10) products a token and
    head; wider keys take each row 2 * (16 + 8) - (6 + 8 + 10) more. 10 rows are as many as pay."""
    lm, oracle = model
    context, ids = ids_of(40, 7), ids_of(rows, 8)
    cache = lm.new_cache(60, base=None)
    lm.run(context, 0, cache)
    calls = []
    hooks = [part.kv_b_proj.register_forward_hook(lambda *_: calls.append(1)) for part in parts_of(lm)]
    logits = lm.run(ids, len(context), cache)
    for hook in hooks:
        hook.remove()
    assert len(calls) == made * 3
    assert_same(logits, causal_logits(oracle, [*context, *ids]))


def test_a_layer_whose_latents_are_expanded_otherwise_is_attended_to_by_keys(model, monkeypatch):
    """What one linear layer does not make is never absorbed."""
    lm, _ = model
    part = parts_of(lm)[0]
    assert absorbed_of(part, 8, 16) is not None
    honest = type(part).expand_kv
    monkeypatch.setattr(type(part), "expand_kv", lambda *given: (honest(*given)[0] * 1.01, honest(*given)[1]))
    assert absorbed_of(part, 8, 16) is None
