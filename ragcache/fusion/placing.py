"""Blocks at their places in a cache: rotated, copied, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ragcache.kv.block import KVBlock
from ragcache.lazy import torch

if TYPE_CHECKING:
    from ragcache.kv.cache import FusedCache
    from ragcache.models.lm import LanguageModel


@dataclass(frozen=True)
class Placement:
    """The place of one block.

    rotate_from: position to which the block's first key is rotated; its other keys follow consecutively
    """

    block: KVBlock
    rotate_from: int


class Placer:
    """Rotates and copies one layer of every block into a cache, one behind the other, from whatever device they are on.

    An encoded block decodes straight into its place: nobody ever holds it decoded.
    """

    def __init__(self, lm: LanguageModel, placements: Sequence[Placement]) -> None:
        from ragcache.kv.rope import AnglesAt

        self._lm = lm
        placements = [p for p in placements if p.block.num_tokens]
        self._blocks = [p.block for p in placements]
        self._lengths = [block.num_tokens for block in self._blocks]
        ranges = [(p.rotate_from, p.rotate_from + p.block.num_tokens) for p in placements]
        parts = [torch.arange(start, end, device=lm.device) for start, end in ranges]
        self.positions = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=lm.device)
        joined = all(end == start for (_, end), (start, _) in pairwise(ranges))
        first = ranges[0][0] if ranges and joined else self.positions
        self._angles = AnglesAt(lm.rope, first, self.positions.shape[0])
        # One layer's keys side by side: they stay in the processor's cache from the copy to the rotation.
        widest = max(layer.num_kv_heads * layer.key_dim for layer in lm.shape.layers)
        self._scratch = torch.empty(widest * self.positions.shape[0], dtype=lm.dtype, device=lm.device)

    def place(self, cache: FusedCache, layer: int) -> None:
        if not self._blocks:
            return
        keys, values = cache.reserve(layer, self.positions)
        scratch = self._scratch[: keys.numel()].view(keys.shape[1:])
        for block, place in zip(self._blocks, torch.split(scratch, self._lengths, dim=1), strict=True):
            block.copy_keys(layer, place)
        self._lm.rope.turn(scratch[None], self._angles.of(layer), keys)
        for block, place in zip(self._blocks, torch.split(values[0], self._lengths, dim=1), strict=True):
            block.copy_values(layer, place)
