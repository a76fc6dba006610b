"""One chunk's keys and values, as tensors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ragcache.errors import DamagedBlockError
from ragcache.kv.block_key import Recipe
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.kv.state import StateMap
from ragcache.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


Part = Literal["keys", "values"]


class Stored(NamedTuple):
    """Where the numbers of layers that are alike lie, for a kernel that reads them by their addresses.

    keys, values: one tensor each, [num_layers, num_kv_heads, num_tokens, head_dim]; of an encoded block codes (uint8 or
                  float8), then scales and, of whole numbers, zero points: of the keys [num_layers, num_kv_heads,
                  groups, head_dim], of the values [num_layers, num_kv_heads, num_tokens, groups]; a number is
                  code * scale + zero
    key_size:     tokens in a group of the keys
    value_size:   channels in a group of the values
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_size: int = 1
    value_size: int = 1


@dataclass(frozen=True, eq=False)
class KVBlock:
    """Keys before RoPE and values of one chunk, in layers that are alike; see MixedBlock for layers that differ.

    keys:   [num_layers, num_kv_heads, num_tokens, head_dim], final (after k_norm where there is one) but not rotated
    values: [num_layers, num_kv_heads, num_tokens, head_dim]
    recipe: how it was encoded, where that is known (a block that was stored is known by its key)

    Raises DamagedBlockError when the shapes do not agree.

    Who needs one layer at a time asks for it by `layer_keys` and `copy_keys` (and the same of values): a block whose
    numbers are not at hand as they are, such as an encoded one, then makes that layer alone (`_layer`, `_copy`).
    """

    keys: Tensor
    values: Tensor
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        if self.keys.ndim != 4 or self.keys.shape[:3] != self.values.shape[:3] or self.values.ndim != 4:
            raise DamagedBlockError(
                f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} are not one block's: both are "
                "[num_layers, num_kv_heads, num_tokens, head_dim]"
            )

    @property
    def key_shape(self) -> torch.Size:
        return self.keys.shape

    @property
    def value_shape(self) -> torch.Size:
        return self.values.shape

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """What a token takes in each layer."""
        num_layers, heads, _, width = self.key_shape
        return (LayerShape(heads, width, self.value_shape[3]),) * num_layers

    @property
    def num_layers(self) -> int:
        return self.key_shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that were read."""
        return self.key_shape[2]

    @property
    def states(self) -> tuple[StateMap, ...]:
        """What the chunk does to the states of recurrent layers; see `kv/state.py`."""
        return ()

    @property
    def tokens_by_layer(self) -> tuple[int, ...]:
        """Tokens whose keys and values each head of a layer holds: all that were read, but in a SparseBlock."""
        return (self.key_shape[2],) * self.num_layers

    @property
    def num_bytes(self) -> int:
        """Bytes that the block takes where it is held."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def stored(self) -> list[tuple[Stored, list[int]]] | None:
        """Where its numbers lie, each with the layers that it holds; None: they have to be asked for."""
        return [(Stored((self.keys,), (self.values,)), [*range(self.num_layers)])]

    def places(self, layer: int) -> Tensor | None:
        """Which tokens the heads of a layer hold: int64 [num_kv_heads, held], ascending; None: all of them."""
        return None

    def layer_keys(self, layer: int) -> Tensor:
        """One layer's keys, [num_kv_heads, held, head_dim], held as `tokens_by_layer`; not to be written to."""
        return self._layer("keys", layer)

    def layer_values(self, layer: int) -> Tensor:
        return self._layer("values", layer)

    def copy_keys(self, layer: int, out: Tensor) -> None:
        """Write one layer's keys to `out`, [num_kv_heads, held, head_dim], of any device and float dtype."""
        self._copy("keys", layer, out)

    def copy_values(self, layer: int, out: Tensor) -> None:
        self._copy("values", layer, out)

    def _layer(self, part: Part, layer: int) -> Tensor:
        return (self.keys if part == "keys" else self.values)[layer]

    def _copy(self, part: Part, layer: int, out: Tensor) -> None:
        out.copy_(self._layer(part, layer), non_blocking=True)

    def held_tensors(self) -> list[Tensor]:
        """All that the block holds."""
        found: list[Tensor] = []

        def look(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.map(look)
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        """The same block over other tensors of the same content: `change` copies or moves each that is held."""
        return replace(self, keys=change(self.keys), values=change(self.values))

    def made_by(self, recipe: Recipe) -> KVBlock:
        """The same block, which says how it was encoded."""
        found = copy.copy(self)
        object.__setattr__(found, "recipe", recipe)  # the field is frozen
        return found

    def equal(self, other: KVBlock) -> bool:
        """Bit for bit."""
        return (self.layers, self.num_tokens) == (other.layers, other.num_tokens) and all(
            torch.equal(self.layer_keys(layer), other.layer_keys(layer))
            and torch.equal(self.layer_values(layer), other.layer_values(layer))
            and _same_places(self.places(layer), other.places(layer))
            for layer in range(self.num_layers)
        )


def _same_places(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


class MixedBlock(KVBlock):
    """A block whose layers differ, in their shape or in how many tokens they hold: one block a group of layers.

    parts:   hold the layers of a group each, in ascending order
    part_of: by layer, the index of its part

    It has no `keys` and `values` of all layers, nor their shapes. Raises DamagedBlockError where the parts are not one
    block's.
    """

    def __init__(self, parts: Sequence[KVBlock], part_of: Sequence[int], recipe: Recipe | None = None) -> None:
        held = [part.num_layers for part in parts]
        if not held or Counter(part_of) != dict(enumerate(held)):
            raise DamagedBlockError(f"parts of {held} layers do not make up the {len(part_of)} layers {list(part_of)}")
        if len({(part.num_tokens, part.dtype) for part in parts}) > 1:
            raise DamagedBlockError("the parts of a block differ in their tokens or dtypes")
        ranks = [iter(range(part.num_layers)) for part in parts]
        self.parts = tuple(parts)
        self.part_of = tuple(part_of)
        self._places = [(parts[part], next(ranks[part])) for part in part_of]
        object.__setattr__(self, "recipe", recipe)  # the block's field is frozen

    def __repr__(self) -> str:
        return f"MixedBlock({list(self.parts)}, {self.part_of})"

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return tuple(part.layers[index] for part, index in self._places)

    @property
    def num_layers(self) -> int:
        return len(self.part_of)

    @property
    def num_tokens(self) -> int:
        return self.parts[0].num_tokens

    @property
    def tokens_by_layer(self) -> tuple[int, ...]:
        return tuple(part.tokens_by_layer[index] for part, index in self._places)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def stored(self) -> list[tuple[Stored, list[int]]] | None:
        found = []
        for number, part in enumerate(self.parts):
            if (own := part.stored) is None:
                return None
            layers = [layer for layer, of in enumerate(self.part_of) if of == number]
            found += [(stored, [layers[index] for index in indices]) for stored, indices in own]
        return found

    def places(self, layer: int) -> Tensor | None:
        part, index = self._places[layer]
        return part.places(index)

    def _layer(self, part: Part, layer: int) -> Tensor:
        own, index = self._places[layer]
        return own._layer(part, index)

    def _copy(self, part: Part, layer: int, out: Tensor) -> None:
        own, index = self._places[layer]
        own._copy(part, index, out)

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        return MixedBlock([part.map(change) for part in self.parts], self.part_of, self.recipe)


def part_of_block(block: KVBlock, start: int, stop: int) -> KVBlock:
    """Tokens [start, stop) of a block that holds all of its tokens in every head: they were read behind those before
    them. Nothing is copied, where the block's numbers are at hand as they are."""
    if isinstance(block, MixedBlock):
        return MixedBlock([part_of_block(part, start, stop) for part in block.parts], block.part_of, block.recipe)
    return KVBlock(block.keys[:, :, start:stop], block.values[:, :, start:stop], block.recipe)


def empty_block(shape: CacheShape, num_tokens: int) -> KVBlock:
    """A block of a model's shape to be written to, layer by layer."""

    def empty(layers: int, heads: int, width: int) -> Tensor:
        return torch.empty(layers, heads, num_tokens, width, dtype=shape.dtype, device=shape.device)

    counts = Counter(shape.layers)
    parts = [
        KVBlock(empty(count, alike.num_kv_heads, alike.key_dim), empty(count, alike.num_kv_heads, alike.value_dim))
        for alike, count in counts.items()
    ]
    kinds = list(counts)
    return parts[0] if len(parts) == 1 else MixedBlock(parts, [kinds.index(layer) for layer in shape.layers])
