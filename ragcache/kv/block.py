"""A chunk's keys and values, as tensors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ragcache.errors import DamagedBlockError
from ragcache.kv.block_key import Recipe
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.kv.state import StateMap
from ragcache.lazy_torch import Tensor, torch

Part = Literal["keys", "values"]


class Stored(NamedTuple):
    """The memory layout of layers that are alike, for a kernel that reads their numbers by address.

    keys, values: the tensors that hold the numbers. A plain block has a single tensor for each, [num_layers,
                  num_kv_heads, num_tokens, head_dim]. An encoded block has three: the codes, uint8 in this shape, the
                  scales and the zero points; a number is code * scale + zero. Scales and zero points of the keys are
                  [num_layers, num_kv_heads, groups, head_dim], those of the values [num_layers, num_kv_heads,
                  num_tokens, groups]
    key_size:     number of tokens that share a scale and a zero point in the keys
    value_size:   number of channels that share a scale and a zero point in the values
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_size: int = 1
    value_size: int = 1


@dataclass(frozen=True, eq=False, repr=False)
class KVBlock:
    """Keys before RoPE and values of a chunk, in layers that are alike; see MixedBlock for layers that differ.

    keys:   [num_layers, num_kv_heads, num_tokens, head_dim], final (after k_norm if the model has it) but not rotated
    values: [num_layers, num_kv_heads, num_tokens, head_dim]
    recipe: how the block was encoded, if known (a stored block is identified by its key)

    Raises DamagedBlockError when the shapes do not agree.

    To read a single layer, call `layer_keys` or `copy_keys` (or the same for values): a block that does not hold its
    numbers directly, such as an encoded block, then computes only that layer (`_layer`, `_copy`).
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_layers} layers, {self.num_tokens} tokens, {self.num_bytes} bytes)"

    @property
    def key_shape(self) -> torch.Size:
        return self.keys.shape

    @property
    def value_shape(self) -> torch.Size:
        return self.values.shape

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Return the shape of a token's keys and values in each layer."""
        num_layers, heads, _, width = self.key_shape
        return (LayerShape(heads, width, self.value_shape[3]),) * num_layers

    @property
    def num_layers(self) -> int:
        return self.key_shape[0]

    @property
    def num_tokens(self) -> int:
        """Return the number of the chunk's tokens, including those that some heads of a SparseBlock do not hold."""
        return self.key_shape[2]

    @property
    def states(self) -> tuple[StateMap, ...]:
        """Return the map of each recurrent layer's state over the chunk (`kv/state.py`); empty without such layers."""
        return ()

    @property
    def tokens_by_layer(self) -> tuple[int, ...]:
        """Return, by layer, how many tokens each head holds: `num_tokens`, except in a SparseBlock."""
        return (self.key_shape[2],) * self.num_layers

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the block takes in memory."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def stored(self) -> list[tuple[Stored, list[int]]] | None:
        """Return the memory layouts of the block's numbers, each with the layers that it describes.

        None: the numbers cannot be read by address, but only by `layer_keys`, `copy_keys` and the like.
        """
        return [(Stored((self.keys,), (self.values,)), [*range(self.num_layers)])]

    def places(self, layer: int) -> Tensor | None:
        """Return the indices of the tokens that each head of a layer holds: int64 [num_kv_heads, held], ascending.

        None: every head holds all tokens.
        """
        return None

    def layer_keys(self, layer: int) -> Tensor:
        """Return a layer's keys, [num_kv_heads, held, head_dim], which must not be written to.

        held: the layer's entry in `tokens_by_layer`
        """
        return self._layer("keys", layer)

    def layer_values(self, layer: int) -> Tensor:
        return self._layer("values", layer)

    def copy_keys(self, layer: int, out: Tensor) -> None:
        """Write a layer's keys to `out`, [num_kv_heads, held, head_dim], on any device and in any float dtype."""
        self._copy("keys", layer, out)

    def copy_values(self, layer: int, out: Tensor) -> None:
        self._copy("values", layer, out)

    def _layer(self, part: Part, layer: int) -> Tensor:
        return (self.keys if part == "keys" else self.values)[layer]

    def _copy(self, part: Part, layer: int, out: Tensor) -> None:
        out.copy_(self._layer(part, layer), non_blocking=True)

    def held_tensors(self) -> list[Tensor]:
        """Return all tensors that the block holds."""
        found: list[Tensor] = []

        def look(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.map(look)
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        """Return the same block over other tensors of equal content: `change` copies or moves each tensor."""
        return replace(self, keys=change(self.keys), values=change(self.values))

    def made_by(self, recipe: Recipe) -> KVBlock:
        """Return the same block with its recipe set."""
        found = copy.copy(self)
        object.__setattr__(found, "recipe", recipe)  # the field is frozen
        return found


class MixedBlock(KVBlock):
    """A block whose layers differ, in their shape or in the number of tokens that they hold.

    parts:   blocks that each hold a group of layers, in ascending order
    part_of: by layer, the index of its part

    It has no `keys` and `values` of all layers, nor their shapes. Raises DamagedBlockError if the parts do not form a
    block.
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
    """Return tokens [start, stop) of a block that holds all of its tokens in every head.

    The result differs from a block of these tokens alone: its tokens have attended to the tokens before `start`. It has
    no maps of recurrent layers' states. Nothing is copied, unless the block has to be decoded.
    """
    if isinstance(block, MixedBlock):
        return MixedBlock([part_of_block(part, start, stop) for part in block.parts], block.part_of, block.recipe)
    return KVBlock(block.keys[:, :, start:stop], block.values[:, :, start:stop], block.recipe)


def empty_block(shape: CacheShape, num_tokens: int) -> KVBlock:
    """Return a block of a model's shape with uninitialised numbers, to be filled layer by layer."""

    def empty(layers: int, heads: int, width: int) -> Tensor:
        return torch.empty(layers, heads, num_tokens, width, dtype=shape.dtype, device=shape.device)

    counts = Counter(shape.layers)
    parts = [
        KVBlock(empty(count, alike.num_kv_heads, alike.key_dim), empty(count, alike.num_kv_heads, alike.value_dim))
        for alike, count in counts.items()
    ]
    kinds = list(counts)
    return parts[0] if len(parts) == 1 else MixedBlock(parts, [kinds.index(layer) for layer in shape.layers])


def example_block(layers: Sequence[LayerShape], num_tokens: int, dtype: torch.dtype) -> KVBlock:
    """Return a block of normally distributed numbers on the CPU, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    shape = CacheShape(tuple(layers), dtype, torch.device("cpu"))
    # Drawn in float32: some dtypes have no random generator, and all dtypes should get the same numbers.
    return empty_block(shape, num_tokens).map(lambda held: torch.randn(held.shape, generator=generator).to(dtype))
