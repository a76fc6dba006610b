"""The checkpoint that all peers load: a published shape, random weights, a tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.prose import train_tokenizer
from benchmarks.random_model import VOCABULARY
from benchmarks.shapes import SHAPES, build

SCORE_STD = 2.0


def write_checkpoint(directory: Path, shape: str, seed: int) -> None:
    """float32, in Hugging Face's layout."""
    model = build(shape, "float32", seed=seed).plain
    sharpen(model)
    model.save_pretrained(directory)
    tokenizer = train_tokenizer(vocab_size=min(VOCABULARY, int(SHAPES[shape]["vocab_size"])))
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def sharpen(model: PreTrainedModel) -> None:
    """Scale the attention's projections: scores get a standard deviation of about SCORE_STD, values of about 1.

    As drawn, every token attends to all others alike and hardly heeds them: greedy decoding repeats the last token, and
    a peer that rotates keys wrongly would answer the same. Inputs of the projections have unit variance, so that of a
    score is the product of the variances of a query's and a key's value. What is computed takes as long.
    """
    drawn = model.config.initializer_range * model.config.hidden_size**0.5  # standard deviation of what comes out
    for layer in model.model.layers:
        attention = layer.self_attn
        for part in (attention.q_proj, attention.k_proj):
            part.weight *= SCORE_STD**0.5 / drawn
        for part in (attention.v_proj, attention.o_proj):
            part.weight *= 1 / drawn
