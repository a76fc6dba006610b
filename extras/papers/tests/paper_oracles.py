"""Parts of several methods' oracles: models with formulas as attention, masks, prompts, and tolerances."""

import torch
from blend_oracle import blended_logits
from families import saved_tiny
from formula_oracle import formula_model

import ragcache as rc

CHOSEN_ON = ["llama", "llama-yarn", "qwen3", "phi3-partial", "mixtral", "mistral-window", "gemma2", "gemma3", "smollm3"]
"""Families on which methods that run tokens again choose them."""
CHUNKS = (17, 3, 20, 12)
LAYERS = 3


def with_formula(name):
    """Return a family's tiny model, and the same model in plain transformers with formulas as its attention."""
    directory = saved_tiny(name)
    return rc.load_lm(directory), formula_model(directory)


def expected_logits(oracle, prompt, chosen):
    """Return the logits of plain transformers where the chosen tokens and the suffix run in every layer."""
    suffix = range(prompt.context_tokens, prompt.num_tokens)
    return blended_logits(oracle, prompt, [torch.tensor([*sorted(chosen), *suffix])] * LAYERS)


def assert_like(ours, theirs):
    """Assert that two tensors are equal within a tolerance relative to the largest number."""
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, atol=3e-5, rtol=0)
