"""Blocks in which each KV head holds only some of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock, MixedBlock, Part
from ragcache.kv.block_key import Recipe
from ragcache.lazy_torch import Tensor, torch


class SparseBlock(KVBlock):
    """A block whose layers are alike, and whose heads hold equally many tokens, but different ones; see `keep`.

    held: the heads' keys and values, [num_layers, num_kv_heads, held, head_dim], in the tokens' order, encoded or not
    bits: which tokens each head holds, uint8 [num_layers, num_kv_heads, ceil(num_tokens / 8)]; see `pack_mask`

    Raises DamagedBlockError if the two do not match.
    """

    def __init__(self, held: KVBlock, bits: Tensor, num_tokens: int, recipe: Recipe | None = None) -> None:
        self.held = held
        self.bits = bits
        self._num_tokens = num_tokens
        object.__setattr__(self, "recipe", recipe)  # the block's field is frozen
        layers, heads, count, _ = held.key_shape
        if bits.dtype != torch.uint8 or tuple(bits.shape) != (layers, heads, -(-num_tokens // 8)):
            raise DamagedBlockError("the bits of a block must state by a bit for each token whether a head holds it")
        mask = unpack_mask(bits, 8 * bits.shape[2])
        if bool((mask[..., :num_tokens].sum(2) != count).any() or mask[..., num_tokens:].any()):
            raise DamagedBlockError(f"a head of a block does not hold {count} of its {num_tokens} tokens")

    @property
    def keys(self) -> Tensor:
        return self.held.keys

    @property
    def values(self) -> Tensor:
        return self.held.values

    @property
    def key_shape(self) -> torch.Size:
        return self.held.key_shape

    @property
    def value_shape(self) -> torch.Size:
        return self.held.value_shape

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        return self.held.num_bytes + self.bits.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def stored(self) -> None:
        return None

    @cached_property
    def _by_layer(self) -> Tensor:
        """Return the tokens that each head holds: int64 [num_layers, num_kv_heads, held]."""
        return unpack_mask(self.bits, self.num_tokens).nonzero()[:, 2].view(*self.key_shape[:3])

    def places(self, layer: int) -> Tensor | None:
        return None if self.key_shape[2] == self.num_tokens else self._by_layer[layer]

    def _layer(self, part: Part, layer: int) -> Tensor:
        return self.held._layer(part, layer)

    def _copy(self, part: Part, layer: int, out: Tensor) -> None:
        self.held._copy(part, layer, out)

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        return SparseBlock(self.held.map(change), change(self.bits), self.num_tokens, self.recipe)


def keep(block: KVBlock, masks: Sequence[Tensor]) -> KVBlock:
    """Return the block with only the tokens that each head should hold, as a part for each layer.

    masks: by layer, bool [num_kv_heads, num_tokens], with equally many tokens in every head of a layer

    The other tokens are not kept in memory. The division into parts does not depend on the masks, even if all layers
    hold equally many tokens, so that a codec's basis (`kvtc`) fits all blocks.
    """
    layers = ((block.layer_keys(number), block.layer_values(number)) for number in range(block.num_layers))
    parts = [_keep(*layer, mask) for layer, mask in zip(layers, masks, strict=True)]
    return MixedBlock(parts, range(len(parts)), block.recipe)


def _keep(keys: Tensor, values: Tensor, mask: Tensor) -> SparseBlock:
    """Return a layer's sparse block. keys, values: [num_kv_heads, num_tokens, head_dim]"""
    keys, values = (numbers[mask].view(1, len(mask), -1, numbers.shape[2]) for numbers in (keys, values))
    return SparseBlock(KVBlock(keys, values), pack_mask(mask.unsqueeze(0)), mask.shape[1])


def pack_mask(mask: Tensor) -> Tensor:
    """Pack bools [..., num_tokens] into bytes [..., ceil(num_tokens / 8)], the first into the lowest bit."""
    whole = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
    bits = torch.unflatten(whole, -1, (whole.shape[-1] // 8, 8)).to(torch.uint8)
    return (bits << _shifts(mask.device)).sum(-1, dtype=torch.uint8)


def unpack_mask(packed: Tensor, num_tokens: int) -> Tensor:
    """Return the bools that were passed to `pack_mask`."""
    return ((packed.unsqueeze(-1) >> _shifts(packed.device)) & 1).flatten(-2)[..., :num_tokens].bool()


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
