"""Checkpoints of models that read images, as they are published: vision tower, projector and all. Prompts of text are
read by the text part, and equal one plain forward of the whole model."""

from __future__ import annotations

import pytest
import torch
from causal_families import causal_config
from families import assert_same, block_diagonal, logits_under, random_prompt
from transformers import AutoModelForImageTextToText

import ragcache as rc

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
