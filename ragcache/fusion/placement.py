"""Blocks at their places in a cache: rotated, copied, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ragcache.kv.block import KVBlock
from ragcache.kv.state import compose
from ragcache.runtime import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.kv.fused_cache import FusedCache
    from ragcache.models.language_model import LanguageModel


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
        self._angles_at = partial(AnglesAt, lm.rope)
        placements = [p for p in placements if p.block.num_tokens]
        self._blocks = [p.block for p in placements]
        self._starts = [p.rotate_from for p in placements]
        held = [block.held_by_layer for block in self._blocks]
        self._lengths = [list(layer) for layer in zip(*held, strict=True)]
        self._sparse = any(min(own) < block.num_tokens for own, block in zip(held, self._blocks, strict=True))
        ranges = [(p.rotate_from, p.rotate_from + p.block.num_tokens) for p in placements]
        parts = [torch.arange(start, end, device=lm.device) for start, end in ranges]
        self.positions = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=lm.device)
        joined = all(end == start for (_, end), (start, _) in pairwise(ranges))
        first = ranges[0][0] if ranges and joined else self.positions
        self._angles = self._angles_at(first, self.positions.shape[0])
        # One layer's keys side by side: they stay in the processor's cache from the copy to the rotation.
        widths = (layer.num_kv_heads * layer.key_dim for layer in lm.shape.layers)
        widest = max((width * sum(own) for width, own in zip(widths, self._lengths, strict=False)), default=0)
        self._kernel = None
        if self._blocks:
            from ragcache.fusion.place_check import place_kernel

            self._kernel = place_kernel(lm, self._blocks)
        width = widest if self._kernel is None else 0
        self._scratch = torch.empty(width, dtype=lm.dtype, device=lm.device)
        if lm.pool.lane is not None:  # now, by the current stream: others read the tables that this fills
            for layer in range(len(self._lengths)):
                self._angles.of(layer)

    def place(self, cache: FusedCache, layer: int) -> None:
        if not self._blocks:
            return
        if (rank := layer - len(self._lengths)) >= 0:
            self._place_state(cache, rank)
            return
        positions, angles, lengths = self.positions, self._angles, self._lengths[layer]
        if self._sparse:
            positions = self._positions_by_head(layer)
            angles = self._angles_at(positions)
        keys, values = cache.reserve(layer, positions)
        if self._kernel is not None:
            self._kernel.place(layer, angles.of(layer), keys[0], values[0])
            return
        scratch = self._scratch[: keys.numel()].view(keys.shape[1:])
        for block, place in zip(self._blocks, torch.split(scratch, lengths, dim=1), strict=True):
            block.copy_keys(layer, place)
        self._lm.rope.turn(scratch[None], angles.of(layer), keys)
        for block, place in zip(self._blocks, torch.split(values[0], lengths, dim=1), strict=True):
            block.copy_values(layer, place)

    def _place_state(self, cache: FusedCache, rank: int) -> None:
        """Take a recurrent layer's state through all blocks, in order."""
        width = self._lm.shape.states[rank].conv[1]
        maps = [block.states[rank] for block in self._blocks]
        cache.states[rank] = compose(cache.states[rank], maps, width, self._lm.device)

    def _positions_by_head(self, layer: int) -> Tensor:
        """int64 [num_kv_heads, tokens that a head holds of all blocks]"""
        heads, parts = self._lm.shape.layers[layer].num_kv_heads, []
        for block, start, count in zip(self._blocks, self._starts, self._lengths[layer], strict=True):
            places = block.places(layer)
            own = torch.arange(count).expand(heads, -1) if places is None else places
            parts.append(own.to(self._lm.device) + start)
        return torch.cat(parts, dim=1)
