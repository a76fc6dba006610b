"""The attention function of training: inference's own, under the mask of the batch.

Registered under "ragcache_training" through transformers' public AttentionInterface. The mask for layers that see
everything is the model's `attention_mask`. Layers with a sliding window take theirs from the batch's `Visibility`,
which reaches them as a keyword argument of the model's forward: that interface hands extra arguments on. So windows,
soft caps and attention sinks follow each layer's own settings in every family.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from ragcache.errors import UnsupportedModelError
from ragcache.models.attention import attention
from ragcache_train.mask import Visibility

NAME = "ragcache_training"


def register() -> None:
    """Make `attn_implementation="ragcache_training"` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, training_attention)


def training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    visibility: Visibility | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Dense mask on a CPU, FlexAttention on a GPU; shapes as in `ragcache.models.attention.attention`.

    Raises UnsupportedModelError when the model does not hand the mask on to its layers.
    """
    mask = attention_mask
    if sliding_window is not None:
        mask = None if visibility is None else visibility.for_attention(sliding_window, query.dtype)
    if mask is None:
        family = type(module).__name__
        raise UnsupportedModelError(
            f"{family} does not get the masks that its model is given; it cannot be trained here"
        )
    if isinstance(mask, BlockMask):
        out, _ = flex_attention_forward(module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux)
        return out, None
    return attention(module, query, key, value, mask, scaling, None, softcap, s_aux)
