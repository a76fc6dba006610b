"""What a run trains and what it leaves: all weights or LoRA's matrices, or the rows of added ids on frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, set_seed

from ragcache.errors import ConfigError
from ragcache.models.adapter import Adapter, Base
from ragcache.models.hub import resolve
from ragcache.models.language_model import LanguageModel
from ragcache.models.load import DTYPES, base_of, checkpoint_digest
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.attention import NAME, register
from ragcache_train.collate import DrawnPairs, DrawnRows, collate, collate_pairs
from ragcache_train.frozen import divergence_loss, freeze, save_frozen
from ragcache_train.layout import EncodedRow
from ragcache_train.lora import add_lora, merge_lora, save_lora
from ragcache_train.loss import answer_loss
from ragcache_train.options import TrainOptions
from ragcache_train.special_tokens import prepare_model, take_rows


class Way(NamedTuple):
    """
    model:   what the Trainer trains
    layers:  the model that has the layers, which may be compiled
    rows:    a data set, from a Draw to what `collate` takes
    collate: a batch of them as tensors
    loss:    of the model, the model without what accelerate wraps around it, a batch, and the number of labels
    save:    writes the result
    """

    model: nn.Module
    layers: nn.Module
    rows: Any
    collate: Callable[..., dict[str, Any]]
    loss: Callable[..., Tensor]
    save: Callable[[], None]


def on_weights(
    lm: LanguageModel,
    spec: TrainedTokens | None,
    rows: Sequence[EncodedRow],
    options: TrainOptions,
    out: Path,
    earlier: Adapter | None,
) -> Way:
    """Train all weights, and a Hugging Face directory comes out, or LoRA's matrices, and an adapter does.

    earlier: the adapter that LoRA goes on from; its base is `lm`
    """
    base, dtype = _base(lm), _saved_dtype(options)
    prepare_model(lm.model, spec, options.seed)
    if earlier is not None and spec is not None:
        take_rows(lm.model, spec, earlier)
    _prepare(lm, options)
    model: nn.Module = lm.model
    if options.lora_rank:
        set_seed(options.seed)  # of the matrices that start random
        mixed = options.runs_bfloat16(str(lm.device))
        model = add_lora(lm.model, spec, options.lora_rank, options.lora_alpha, earlier, mixed)
    else:
        model.requires_grad_(True)
    save = partial(_save, lm, model, dtype, out)
    if options.makes_lora_adapter:
        save = partial(save_lora, lm, model, base, spec, dtype, out)
    return Way(model, lm.model, DrawnRows(rows, spec, options.shuffle_passages), collate, answer_loss, save)


def on_frozen_weights(
    lm: LanguageModel,
    spec: TrainedTokens | None,
    rows: Sequence[EncodedRow],
    options: TrainOptions,
    out: Path,
    earlier: Adapter | None,
) -> Way:
    """Train the rows of the added ids; an adapter comes out. Raises ConfigError where there are none.

    earlier: the adapter that they go on from; its base is `lm`
    """
    if spec is None or not spec.added_ids:
        raise ConfigError(f"reuse {options.reuse!r} adds no ids, which leaves nothing to train on frozen weights")
    _prepare(lm, options)
    lm.model.train(options.checkpointing)  # transformers recomputes activations in training mode alone
    model = freeze(lm, spec, rows[0].prefix, options.seed, earlier)
    save = partial(save_frozen, model, lm, _base(lm), spec, out)
    return Way(model, lm.model, DrawnPairs(rows, spec, options.shuffle_passages), collate_pairs, divergence_loss, save)


def _prepare(lm: LanguageModel, options: TrainOptions) -> None:
    """Let the model's attention follow the masks of training."""
    register()
    lm.model.set_attn_implementation(NAME)
    if options.checkpointing:
        lm.model.gradient_checkpointing_enable({"use_reentrant": False})


def _base(lm: LanguageModel) -> Base:
    """What an adapter states of the model that it is trained beside, before anything is added to it."""
    name, text = str(lm.name), lm.config.get_text_config(decoder=True)
    return Base(
        str(Path(name).resolve()) if Path(name).exists() else name,
        str(checkpoint_digest(resolve(name))),
        int(text.num_hidden_layers),
        int(text.hidden_size),
        int(text.vocab_size),
        len(lm.tokenizer),
    )


def _saved_dtype(options: TrainOptions) -> torch.dtype:
    """The dtype in which the model to start from was saved, unless the options say otherwise."""
    saved = getattr(AutoConfig.from_pretrained(base_of(options.model)), "dtype", None) or torch.float32
    return DTYPES[options.save_dtype] if options.save_dtype is not None else saved


def _save(lm: LanguageModel, model: Any, dtype: torch.dtype, out: Path) -> None:
    """Weights, configuration and tokenizer, as any Hugging Face directory."""
    lm.model.config.use_cache = True  # the Trainer turns it off
    merged = merge_lora(model).to(dtype)
    merged.set_attn_implementation("sdpa")
    merged.save_pretrained(out)
    lm.tokenizer.save_pretrained(out)
