"""Adapters with rows of any numbers, beside any base."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from ragcache.models.adapter import Base, write_adapter
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.trained_tokens import TrainedTokens


def save_adapter(
    directory: Path, base: Path, spec: TrainedTokens, *, seed: int = 0, rows: dict[int, Tensor] | None = None
) -> dict[int, Tensor]:
    """An adapter of `base` in `directory`; its tokenizer is the base's with tokens up to the last id, where it has one.

    rows: by id; random ones when None, which are returned
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(base).get_text_config(decoder=True)
    added = sorted(spec.added_ids)
    num_tokens = 0
    if (base / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(base)
        names = [f"<|row-{number}|>" for number in range(len(tokenizer), added[-1] + 1)]
        tokenizer.add_special_tokens({"additional_special_tokens": names})
        tokenizer.save_pretrained(directory)
        num_tokens = len(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    made = rows or {id: 0.3 * torch.randn(config.hidden_size, generator=generator) for id in added}
    belongs = Base(
        str(base),
        str(checkpoint_digest(str(base))),
        config.num_hidden_layers,
        config.hidden_size,
        config.vocab_size,
        num_tokens,
    )
    write_adapter(directory, belongs, spec, made)
    return made
