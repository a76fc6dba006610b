"""Adapters with rows of any numbers, beside any base; their matrices change nothing."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ragcache.models.adapter import Base, write_adapter
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.lora import DELTA, DOWN, LORA_FILE, ROOT, UP, Lora
from ragcache.models.trained_tokens import TrainedTokens


def save_adapter(
    directory: Path, base: Path, spec: TrainedTokens, *, seed: int = 0, rows: dict[int, Tensor] | None = None
) -> dict[int, Tensor]:
    """An adapter of `base` in `directory`; its tokenizer is the base's with tokens up to the last id, where it has one.

    Its matrices are zero beside one linear layer, and act on passages alone.

    rows: by id; random ones when None, which are returned
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(base)
    text = config.get_text_config(decoder=True)
    added = sorted(spec.added_ids)
    num_tokens, tokenizer = 0, None
    if (base / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(base)
        names = [f"<|row-{number}|>" for number in range(len(tokenizer), added[-1] + 1)]
        tokenizer.add_special_tokens({"additional_special_tokens": names})
        tokenizer.save_pretrained(directory)
        num_tokens = len(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    made = rows or {id: 0.3 * torch.randn(text.hidden_size, generator=generator) for id in added}
    save_by_hand(directory, base, config, made)
    sizes = text.num_hidden_layers, text.hidden_size, text.vocab_size
    belongs = Base(str(base), str(checkpoint_digest(str(base))), *sizes, num_tokens)
    write_adapter(directory, belongs, spec, tokenizer, on_passages=True)
    return made


def save_by_hand(directory: Path, base: Path, config, rows: dict[int, Tensor]) -> None:
    """peft's two files: the rows, and matrices of zeros beside the first linear layer that is not the head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    places = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    layer = next(one for one in model.modules() if isinstance(one, nn.Linear) and one is not head)
    embedding, beside = places[id(model.get_input_embeddings())], f"{ROOT}{places[id(layer)]}"
    tensors = {
        f"{ROOT}{embedding}{DELTA}": torch.stack([rows[id].float() for id in sorted(rows)]),
        f"{beside}{DOWN}": torch.zeros(2, layer.in_features),
        f"{beside}{UP}": torch.zeros(layer.out_features, 2),
    }
    save_file(tensors, directory / LORA_FILE, {"format": "pt"})
    stated = {
        "peft_type": "LORA",
        Lora.BASE: str(base),
        "r": 2,
        "lora_alpha": 2,
        "trainable_token_indices": {embedding: sorted(rows)},
    }
    (directory / Lora.FILE).write_text(json.dumps(stated))
