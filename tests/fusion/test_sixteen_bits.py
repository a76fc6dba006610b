"""Law 1 in 16 bits: moved keys add no more error than plain transformers' own arithmetic in that dtype has.

The truth is one float32 forward of the weights as they are in 16 bits, under the block-diagonal mask. Plain eager
transformers in 16 bits is away from it by rounding (0.012 to 0.17 of the logits' norm in bfloat16 over these models
and prompts, 0.0017 to 0.043 in float16); `reposition` may be away by `MOST` times as much, over the same prompts. A key
one position off is away by more than that in every family.
"""

from __future__ import annotations

import copy

import pytest
import torch
from families import block_diagonal, masks_of, oracle_logits, random_prompt, save_tiny
from transformers import AutoModelForCausalLM

import ragcache as rc

FAMILIES = ("deepseek_v2", "deepseek_v3", "granite_swa", "llama", "llama4", "ministral3", "phi3-long")
DTYPES = ("bfloat16", "float16")
MOST = 1.5


@pytest.fixture(scope="module", params=[(family, dtype) for family in FAMILIES for dtype in DTYPES], ids="-".join)
def noise(request, tmp_path_factory):
    """The model, prompts with the truth, and how far plain transformers is away from it, mean over the prompts."""
    family, dtype = request.param
    directory = save_tiny(family, str(tmp_path_factory.mktemp(family)))
    lm, kind = rc.load_lm(directory, dtype=dtype), getattr(torch, dtype)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=kind, attn_implementation="eager").eval()
    exact = copy.deepcopy(plain).float()
    prompts = [random_prompt(seed) for seed in range(4)]
    truths = [oracle_logits(exact, prompt, block_diagonal(prompt)) for prompt in prompts]
    own = [away(rounded_logits(plain, one), truth) for one, truth in zip(prompts, truths, strict=True)]
    return lm, prompts, truths, sum(own) / len(own)


def away(logits, truth):
    return float((logits.float() - truth).norm() / truth.norm())


def rounded_logits(model, prompt):
    masks = masks_of(model, block_diagonal(prompt))
    lowest = torch.finfo(model.dtype).min

    def fitting(mask):
        return mask.clamp_min(lowest).to(model.dtype)

    masks = {kind: fitting(mask) for kind, mask in masks.items()} if isinstance(masks, dict) else fitting(masks)
    positions = torch.arange(prompt.num_tokens)[None]
    with torch.no_grad():
        out = model(input_ids=torch.tensor([prompt.ids]), position_ids=positions, attention_mask=masks)
    return out.logits[0, -1]


def repositioned(lm, prompts, truths):
    """How far `reposition` is away, mean over the prompts."""
    fused = (rc.fuse(lm, prompt, "reposition", recipe="isolated").next_logits for prompt in prompts)
    return sum(away(logits, truth) for logits, truth in zip(fused, truths, strict=True)) / len(prompts)


def test_reposition_is_within_the_rounding_of_its_dtype(noise):
    lm, prompts, truths, own = noise
    assert repositioned(lm, prompts, truths) < MOST * own


def test_a_key_one_position_off_is_beyond_the_bound(noise, monkeypatch):
    lm, prompts, truths, own = noise
    honest = lm.rope.angles
    monkeypatch.setattr(lm.rope, "angles", lambda layer, at, count=0: honest(layer, at + 1, count))
    assert repositioned(lm, prompts, truths) > MOST * own
