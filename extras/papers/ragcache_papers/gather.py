"""Places a selection of a context's tokens from their blocks; each layer may have another selection."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ragcache.errors import ConfigError
from ragcache.fusion.method import PrefillRequest
from ragcache.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from ragcache.kv.fused_cache import FusedCache
    from ragcache.models.attention import Projected


def attention_received(asking: Projected, key: Tensor, key_positions: Tensor) -> Tensor:
    """Return the attention that each key gets from `asking`, summed over queries and heads: float32 [length].

    key: [1, num_kv_heads, length, head_dim]; key_positions: int64 [length]
    """
    total = torch.zeros(key.shape[2], device=key.device)
    for weights in asking.weights(key, key_positions):
        total += weights.sum(0)
    return total


class Held(NamedTuple):
    """A cache whose first entries are the tokens at these slots, int64, ascending."""

    cache: FusedCache
    slots: Tensor


class Gather:
    """Placing for sparse methods, which keep few tokens, and different tokens in each layer.

    A token's slot is its rank among the prefix's and all blocks' tokens. Only the requested tokens of a block are
    copied and rotated, and only they leave the block's device. The host has to know their number: on a GPU each layer
    waits for the layer before it, which costs more time than the omitted tokens save.

    positions: int64 [num_tokens], by slot

    Raises ConfigError for a model that keeps latents: choosing by keys would first have to compute the keys of all
    tokens.
    """

    def __init__(self, request: PrefillRequest) -> None:
        self._request = request
        self._lm = lm = request.lm
        if lm.shape.latent:
            raise ConfigError(
                f"the method chooses by keys of heads, and {lm.name} keeps latents in their place; choose one that "
                "does not, such as reposition, cacheblend or a3"
            )
        placements = request.placements
        self._blocks = [block for block, _ in placements]
        parts = [torch.arange(start, start + block.num_tokens) for block, start in placements]
        self.positions = torch.cat([torch.arange(request.known), *parts]).to(lm.device)
        bounds = list(accumulate((block.num_tokens for block in self._blocks), initial=request.known))
        self._starts, self._ends = bounds[:-1], torch.tensor(bounds[1:], dtype=torch.int64, device=lm.device)
        self._cut: tuple[Tensor, list[Tensor]] = (self.slots[:0], [])

    @property
    def slots(self) -> Tensor:
        """Return every token's slot: int64."""
        return torch.arange(self.positions.shape[0], device=self._lm.device)

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        """Return rotated keys of tokens of the blocks, [num_kv_heads, num_slots, head_dim]. slots: int64, ascending"""
        return self._lm.rope.rotate(self._keys(layer, slots), layer, self.positions[slots])

    def place(self, cache: FusedCache, layer: int, slots: Tensor, held: Held | None = None) -> None:
        """Place these tokens in an empty layer of a cache. slots: int64, ascending, including all of the prefix's

        held: tokens that another cache has already; they are copied from it
        """
        from ragcache.kv.exact import place_exact

        if self._request.exact is not None:
            place_exact(cache, layer, self._request.exact)
        slots = slots[self._request.known :]
        keys, values = cache.reserve(layer, self.positions[slots])
        if not slots.numel():
            return
        if held is None:
            self._lm.rope.rotate(self._keys(layer, slots), layer, self.positions[slots], out=keys[0])
            values[0] = self._values(layer, slots)
            return
        again = torch.isin(slots, held.slots)
        old, new = again.nonzero()[:, 0], (~again).nonzero()[:, 0]  # the host waits here, and not at each copy
        places = torch.searchsorted(held.slots, slots[old])
        for part, placed in zip((keys, values), held.cache.layer_state(layer), strict=False):
            part[0, :, old] = placed[0, :, places]
        if new.numel():
            keys[0, :, new] = self.keys(layer, slots[new])
            values[0, :, new] = self._values(layer, slots[new])

    def _keys(self, layer: int, slots: Tensor) -> Tensor:
        return self._take([block.layer_keys(layer) for block in self._blocks], slots)

    def _values(self, layer: int, slots: Tensor) -> Tensor:
        return self._take([block.layer_values(layer) for block in self._blocks], slots)

    def _take(self, parts: list[Tensor], slots: Tensor) -> Tensor:
        """Return the tokens at these slots of the joined parts, [num_kv_heads, num_tokens, dim] each."""
        taken = [
            part.index_select(1, index.to(part.device)).to(self._lm.device, self._lm.dtype)
            for part, index in zip(parts, self._by_block(slots), strict=True)
            if len(index)
        ]
        return taken[0] if len(taken) == 1 else torch.cat(taken, dim=1)

    def _by_block(self, slots: Tensor) -> list[Tensor]:
        """Return the ranks of these tokens in their blocks, block by block.

        The last slots are remembered, so that the same slots are not read back from the device twice.
        """
        if self._cut[0] is not slots:
            bounds = [0, *torch.searchsorted(slots, self._ends).tolist()]
            cuts = zip(self._starts, bounds[:-1], bounds[1:], strict=True)
            self._cut = (slots, [slots[first:last] - start for start, first, last in cuts])
        return self._cut[1]
