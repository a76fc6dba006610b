"""The attention mask of training: one rule over one number a token.

KVLink (arXiv 2502.16002), figure 2: a chunk's tokens see their own chunk only; everything else of the context (prefix,
link tokens, KV-START, KV-END) sees all that stands before it; so does a question. Several questions may follow one
context: each sees the context and itself. Order is that of the sequence, not of the positions, which start again at
every question (and at every chunk where TurboRAG's composite positions are trained).

KVLink's compressed caches (section 2.4, figure 7): a chunk's text sees its own segment, an anchor its segment and the
anchors of the chunk before it, and all else anchors but no such text.

The number is the token's segment:

    > 0            its chunk, read alone; with anchors, the segment too, and whether it is text (`kv/anchor_tokens.py`)
    0              the open part of the context: prefix, link tokens, KV-START and KV-END
    < 0            its question
    PADDING        no token; nothing else sees it, and it sees itself, since no row of a mask may be empty

`sees` is the whole rule. The dense mask of a CPU and FlexAttention's block mask of a GPU are both made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ragcache.kv.anchor_tokens import OPEN, gives_way, sees_within
from ragcache.models.attention_kernels import additive

PADDING = -(1 << 30)


def sees(
    query_segment: Tensor,
    key_segment: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    distance: Tensor,
    window: int | None,
) -> Tensor:
    """Whether a query sees a key; all tensors broadcast.

    index: place in the sequence; distance: the query's position less the key's; window: of a sliding layer
    """
    stays: Tensor = ~gives_way(key_segment)
    from_open_to_context = (query_segment <= OPEN) & (key_segment >= OPEN) & stays
    visible = (key_index <= query_index) & (sees_within(query_segment, key_segment) | from_open_to_context)
    return visible if window is None else visible & (distance < window)


@dataclass(eq=False)
class Visibility:
    """Masks of one batch, made once for each sliding window and kept.

    segments, positions: int64 [batch, length]
    """

    segments: Tensor
    positions: Tensor
    _dense: dict[int | None, Tensor] = field(default_factory=dict)
    _blocks: dict[int | None, BlockMask] = field(default_factory=dict)

    def mask(self, window: int | None = None) -> Tensor:
        """bool [batch, 1, length, length]: the rule for every pair."""
        index = torch.arange(self.segments.shape[1], device=self.segments.device)
        segments, positions = self.segments[:, None], self.positions[:, None]
        distance = positions[..., :, None] - positions[..., None, :]
        return sees(segments[..., :, None], segments[..., None, :], index[:, None], index, distance, window)

    def dense(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The mask as numbers to add to the scores: what `scaled_dot_product_attention` takes fastest."""
        if window not in self._dense:
            self._dense[window] = additive(self.mask(window), dtype)
        return self._dense[window]

    def blocks(self, window: int | None) -> BlockMask:
        """The mask as FlexAttention takes it; blocks that nobody sees are never computed."""
        if window not in self._blocks:
            batch, length = self.segments.shape
            device = str(self.segments.device)
            self._blocks[window] = create_block_mask(self.rule(window), batch, None, length, length, device)
        return self._blocks[window]

    def for_attention(self, window: int | None, dtype: torch.dtype) -> Tensor | BlockMask:
        """The mask in the form that the device's attention takes."""
        return self.blocks(window) if self.segments.is_cuda else self.dense(window, dtype)

    def rule(self, window: int | None) -> Any:
        """FlexAttention's mask_mod: (batch, head, query index, key index) -> bool."""
        segments, positions = self.segments, self.positions

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = positions[batch, query] - positions[batch, key]
            return sees(segments[batch, query], segments[batch, key], query, key, distance, window)

        return mask_mod
