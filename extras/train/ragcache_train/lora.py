"""LoRA by peft: low-rank matrices beside every linear layer, and the rows of new tokens, trained; merged at the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ragcache.errors import ConfigError
from ragcache.models.trained_tokens import TrainedTokens


def add_lora(model: PreTrainedModel, spec: TrainedTokens | None, rank: int, alpha: int | None) -> nn.Module:
    """alpha: scale of the matrices' product, over the rank; None: twice the rank.

    Raises ConfigError when peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("LoRA needs peft; install ragcache-kv[train]") from error
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    added = sorted(spec.added_ids) if spec is not None else []
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules="all-linear",
        trainable_token_indices={embedding: added} if added else None,
    )
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def merge_lora(model: Any) -> Any:
    """The model with its adapter added to its weights; a model without one stays as it is."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


@contextmanager
def known_warnings_ignored() -> Iterator[None]:
    """peft says with every checkpoint that it saves the embeddings of a vocabulary that grew, which is as it should."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
        yield
