"""The loss on answers, with logits computed only where there is a label."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ragcache_train.mask import Visibility


def answer_loss(
    model: nn.Module, inner: nn.Module, batch: dict[str, Any], num_labels: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy of the labelled tokens, divided by `num_labels` (None: by their number).

    inner: `model` without what accelerate wraps around it
    batch: see collate
    """
    labels = batch["labels"]
    total = F.cross_entropy(answer_logits(model, inner, batch), labels, reduction="sum")
    return total / (len(labels) if num_labels is None else num_labels)


def answer_logits(model: nn.Module, inner: Any, batch: dict[str, Any]) -> Tensor:
    """Logits of the labelled tokens, in order: float32 [num_labels, vocab_size]. Arguments as of `answer_loss`."""
    visibility = Visibility(batch["segments"], batch["position_ids"][0], batch["rows"], batch["lengths"])
    with narrowed_head(inner, batch["places"]):
        logits: Tensor = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            visibility=visibility,
            use_cache=False,
        ).logits
    return logits[0].float()


@contextmanager
def narrowed_head(model: Any, chosen: Tensor) -> Iterator[None]:
    """The output head reads `chosen` tokens of the sequence only: logits are [1, num_chosen, vocab_size].

    Scales and soft caps that a family applies to its logits follow the head and act on each logit alone.
    """

    def narrow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].index_select(1, chosen), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()
