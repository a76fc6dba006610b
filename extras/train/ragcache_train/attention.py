"""The attention function of training: inference's own, under the mask of the batch.

Registered under "ragcache_training" through transformers' public AttentionInterface. Layers take their masks from the
batch's `Visibility`, which reaches them as a keyword argument of the model's forward: that interface hands extra
arguments on. So windows, soft caps and attention sinks follow each layer's own settings in every family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from ragcache.errors import UnsupportedModelError
from ragcache.models.attention_kernels import Scoring, attend
from ragcache_train.mask import Visibility

NAME = "ragcache_training"


def register() -> None:
    """Make `attn_implementation="ragcache_training"` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, training_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # layers are compiled around it
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
    """Row by row under dense masks on a CPU, FlexAttention on a GPU.

    query: [1, num_heads, length, head_dim]; key, value: [1, num_kv_heads, length, head_dim]. Returns [1, length,
    num_heads, head_dim], as transformers' own attention functions do.

    Raises UnsupportedModelError when the model does not hand the batch's rule on to its layers.
    """
    if visibility is None:
        family = type(module).__name__
        raise UnsupportedModelError(
            f"{family} does not get the masks that its model is given; it cannot be trained here"
        )
    query, key = query.to(value.dtype), key.to(value.dtype)  # the rotation of float32 weights leaves them float32
    mask = visibility.for_attention(sliding_window, value.dtype)
    if isinstance(mask, BlockMask):
        out, _ = flex_attention_forward(module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux)
        return out, None
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    queries, keys, values = (torch.split(one, list(visibility.lengths), dim=2) for one in (query, key, value))
    rows = zip(queries, keys, values, mask, strict=True)
    out = torch.cat([attend(own, seen, held, hides, False, scoring) for own, seen, held, hides in rows], dim=2)
    return out.transpose(1, 2).contiguous(), None
