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
from ragcache.models.adapter import Adapter
from ragcache.models.language_model import LanguageModel
from ragcache.models.load import DTYPES, base_of
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.attention import NAME, register
from ragcache_train.collate import DrawnPairs, DrawnRows, collate, collate_pairs
from ragcache_train.frozen import divergence_loss, freeze, save_frozen
from ragcache_train.layout import EncodedRow
from ragcache_train.lora import add_lora, merge_lora
from ragcache_train.loss import answer_loss
from ragcache_train.options import TrainOptions
from ragcache_train.special_tokens import prepare_model


class Way(NamedTuple):
    """
    model:   what the Trainer trains
    rows:    a data set, from a Draw to what `collate` takes
    collate: a batch of them as tensors
    loss:    of the model, the model without what accelerate wraps around it, a batch, and the number of labels
    save:    writes the result
    """

    model: nn.Module
    rows: Any
    collate: Callable[..., dict[str, Any]]
    loss: Callable[..., Tensor]
    save: Callable[[], None]


def on_weights(
    lm: LanguageModel, spec: TrainedTokens | None, rows: Sequence[EncodedRow], options: TrainOptions, out: Path
) -> Way:
    """Train all weights, or LoRA's matrices; a Hugging Face directory comes out."""
    prepare_model(lm.model, spec, options.seed)
    _prepare(lm, options)
    model: nn.Module = lm.model
    if options.lora_rank:
        set_seed(options.seed)  # of the matrices that start random
        model = add_lora(lm.model, spec, options.lora_rank, options.lora_alpha)
    else:
        model.requires_grad_(True)
    save = partial(_save, lm, model, _saved_dtype(options), out)
    return Way(model, DrawnRows(rows, spec, options.shuffle_passages), collate, answer_loss, save)


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
    save = partial(save_frozen, model, lm, spec, out)
    return Way(model, DrawnPairs(rows, spec, options.shuffle_passages), collate_pairs, divergence_loss, save)


def _prepare(lm: LanguageModel, options: TrainOptions) -> None:
    """Let the model's attention follow the masks of training."""
    register()
    lm.model.set_attn_implementation(NAME)
    if options.checkpointing:
        lm.model.gradient_checkpointing_enable({"use_reentrant": False})


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
