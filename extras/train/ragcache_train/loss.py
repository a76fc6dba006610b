"""The loss on answers, with logits computed only where there is a label."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ragcache_train.layout import IGNORED
from ragcache_train.mask import Visibility


def answer_loss(
    model: nn.Module, inner: nn.Module, batch: dict[str, Tensor], num_labels: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy of the labelled tokens, divided by `num_labels` (None: by their number).

    inner: `model` without what accelerate wraps around it
    batch: see collate
    """
    labels = batch["labels"].flatten()
    labels = labels[labels != IGNORED]
    total = F.cross_entropy(answer_logits(model, inner, batch), labels, reduction="sum")
    return total / (labels.numel() if num_labels is None else num_labels)


def answer_logits(model: nn.Module, inner: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits of the labelled tokens, in order: float32 [num_labels, vocab_size]. Arguments as of `answer_loss`."""
    chosen = torch.nonzero(batch["labels"].flatten() != IGNORED).squeeze(-1)
    visibility = Visibility(batch["segments"], batch["position_ids"])
    dtype = (
        torch.get_autocast_dtype(chosen.device.type) if torch.is_autocast_enabled(chosen.device.type) else inner.dtype
    )
    with narrowed_head(inner, chosen):
        logits: Tensor = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=visibility.for_attention(None, dtype),
            visibility=visibility,
            use_cache=False,
        ).logits
    return logits[0].float()


@contextmanager
def narrowed_head(model: Any, chosen: Tensor) -> Iterator[None]:
    """The output head reads `chosen` tokens of the flattened batch only: logits are [1, num_chosen, vocab_size].

    Scales and soft caps that a family applies to its logits follow the head and act on each logit alone.
    """

    def narrow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].flatten(0, 1)[chosen][None], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()
