"""The attention function of training: inference's own, under the mask of the batch.

Registered under "ragcache_training" through transformers' public AttentionInterface. The batch's `Visibility` reaches
it as a keyword argument of the model's forward, which is how that interface hands extra arguments on. So sliding
windows, soft caps and attention sinks follow each layer's own settings in every family.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from ragcache.errors import UnsupportedModelError
from ragcache.models.attention import attention
from ragcache.training.reuse.mask import Visibility

NAME = "ragcache_training"


def register() -> None:
    """Make `attn_implementation="ragcache_training"` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, training_attention)


def training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    visibility: Visibility | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Dense mask on a CPU, FlexAttention on a GPU; shapes as in `ragcache.models.attention.attention`.

    Raises UnsupportedModelError when the model does not hand the batch's visibility on to its layers.
    """
    if visibility is None:
        family = type(module).__name__
        raise UnsupportedModelError(
            f"{family} drops extra arguments of forward, so its attention cannot be masked here"
        )
    if query.is_cuda:
        blocks = visibility.blocks(sliding_window)
        out, _ = flex_attention_forward(
            module, query, key, value, blocks, scaling=scaling, softcap=softcap, s_aux=s_aux
        )
        return out, None
    mask = visibility.dense(sliding_window, query.dtype)
    return attention(module, query, key, value, mask, scaling, sliding_window, softcap, s_aux)
