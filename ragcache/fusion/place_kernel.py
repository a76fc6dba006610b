"""A Triton kernel that rotates and places a layer of all blocks, and reads the blocks without moving them first.

The kernel reads a block in page-locked memory over the bus. This saves a copy of the block to the device, and a launch
for each block: a prompt of ten passages took 2,016 launches. int8 blocks cross the bus encoded, with half the bytes.
The results match those of PyTorch's operations (`Placer`) within the rounding of a float32 operation; `place_check`
compares them at a model's first use. Tokens are written consecutively or to slots of pages: the same kernel fills
vLLM's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ragcache.kv.block import KVBlock, Stored

if TYPE_CHECKING:
    from ragcache.kv.rope import Angles

TILE = 32  # tokens that one program places
ALIGNED = 16  # bytes that a thread reads at once
Parts = list[tuple[Stored, list[int]]]
_TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8,
}  # fmt: skip


@triton.jit
def _read(table, offsets, scale_offsets, live, SOURCE: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr):
    """Return float32 numbers of a tensor, rounded to DTYPE, the block's dtype, and then to OUT, the cache's.

    table:         address of the tensor; for codes, the addresses of their scales and zero points follow
    offsets:       of the numbers in the tensor
    scale_offsets: of their scales and zero points
    live:          which numbers exist; 0 is returned for the others
    """
    address = tl.multiple_of(tl.load(table).to(tl.pointer_type(SOURCE)), 16)
    numbers = tl.load(address + offsets, mask=live, other=0).to(tl.float32)
    if tl.uint8 == SOURCE:
        scales = tl.load(table + 1).to(tl.pointer_type(tl.float16))
        zeros = tl.load(table + 2).to(tl.pointer_type(tl.float16))
        numbers = numbers * tl.load(scales + scale_offsets, mask=live, other=0).to(tl.float32)
        numbers = numbers + tl.load(zeros + scale_offsets, mask=live, other=0).to(tl.float32)
        if tl.float16 == DTYPE:
            numbers = tl.minimum(tl.maximum(numbers, -65504.0), 65504.0)
    return numbers.to(DTYPE).to(OUT).to(tl.float32)


@triton.jit(do_not_specialize=["layer", "first_head"])
def _place(
    table, spans, slots, cos, sin, keys, values, layer, first_head, key_head, key_page, key_row, key_column,
    value_head, value_page, value_row, value_column, PAGE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr, SOURCE: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Place one tile of a block's tokens for one head: program (block, tile of its tokens, head).

    table:        int64 [num_layers, blocks, 6]: addresses of keys and of values, each followed by those of scales and
                  zero points
    spans:        int64 [blocks, 6]: index of the block's first token among all tokens to place, number of its tokens to
                  place, distance between its heads in rows, number of tokens in a group of its keys, number of such
                  groups, and which of its tokens is the first to place
    slots:        int64 [num_tokens]: the slot that each token is written to, with PAGE slots a page; PAGE 0: tokens are
                  written consecutively
    cos, sin:     [num_tokens, HALF]; HALF 0: the layer does not rotate
    first_head:   the blocks' head that is written to head 0
    keys, values: [num_kv_heads, num_pages, PAGE, dim] or [num_kv_heads, num_tokens, dim], with the strides given
    """
    block, tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    span, entry = spans + block * 6, table + (layer * tl.num_programs(0) + block) * 6
    first, count, stride = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    group, groups, offset = tl.load(span + 3), tl.load(span + 4), tl.load(span + 5)
    if tile * ROWS >= count:
        return
    own = tile * ROWS + tl.arange(0, ROWS)[:, None]
    there = own < count
    held, held_head, target = offset + own, first_head + head, first + own
    source, key_group = held_head * stride + held, (held_head * groups + held // group) * KEY_DIM
    page, row = 0, target
    if PAGE > 0:
        slot = tl.load(slots + target, mask=there, other=0)
        page, row = slot // PAGE, slot % PAGE
    key_place = keys + head * key_head + page * key_page + row * key_row
    value_place = values + head * value_head + page * value_page + row * value_row
    out = keys.dtype.element_ty
    if HALF > 0:
        column = tl.arange(0, HALF_WIDTH)[None, :]
        live = there & (column < HALF)
        one = _read(entry, source * KEY_DIM + column, key_group + column, live, SOURCE, DTYPE, out)
        column_b = column + HALF
        two = _read(entry, source * KEY_DIM + column_b, key_group + column_b, live, SOURCE, DTYPE, out)
        c = tl.load(cos + target * HALF + column, mask=live, other=0)
        s = tl.load(sin + target * HALF + column, mask=live, other=0)
        tl.store(key_place + column * key_column, (one * c - two * s).to(out), mask=live)
        tl.store(key_place + column_b * key_column, (two * c + one * s).to(out), mask=live)
    if KEY_DIM > 2 * HALF:
        column = 2 * HALF + tl.arange(0, REST_WIDTH)[None, :]
        live = there & (column < KEY_DIM)
        rest = _read(entry, source * KEY_DIM + column, key_group + column, live, SOURCE, DTYPE, out)
        tl.store(key_place + column * key_column, rest.to(out), mask=live)
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    live = there & (column < VALUE_DIM)
    scale = source * ((VALUE_DIM + VALUE_SIZE - 1) // VALUE_SIZE) + column // VALUE_SIZE
    value = _read(entry + 3, source * VALUE_DIM + column, scale, live, SOURCE, DTYPE, out)
    tl.store(value_place + column * value_column, value.to(out), mask=live)


class _Launch(NamedTuple):
    """Blocks whose numbers have the same dtypes, placed by a single launch for each layer.

    table, spans: see `_place`
    longest:      the largest number of tokens to place of a block
    source:       dtype of the stored numbers; dtype: of the decoded block
    value_sizes:  by layer, number of channels in a group of the values
    """

    table: Tensor
    spans: Tensor
    longest: int
    source: torch.dtype
    dtype: torch.dtype
    value_sizes: Sequence[int]


@dataclass(eq=False, repr=False)
class PlaceKernel:
    """Places some blocks consecutively, with one launch a layer for each combination of stored and decoded dtype."""

    _launches: Sequence[_Launch]

    @classmethod
    def of(
        cls, blocks: Sequence[KVBlock], device: torch.device, parts_of: Sequence[tuple[int, int]] | None = None
    ) -> PlaceKernel | None:
        """Return the kernel over these blocks, or None if the device cannot read one of them by its address.

        parts_of: for each block, the first token to place and the number of tokens; None: all tokens
        """
        kinds: dict[tuple[torch.dtype, torch.dtype], list[tuple[Sequence[int], KVBlock, Parts]]] = {}
        first = 0
        for block, (offset, count) in zip(blocks, parts_of or [(0, block.num_tokens) for block in blocks], strict=True):
            parts = block.stored
            if parts is None or not _readable([stored for stored, _ in parts], device):
                return None
            alike = kinds.setdefault((parts[0][0].keys[0].dtype, block.dtype), [])
            alike.append(((first, count, offset), block, parts))
            first += count
        launches = []
        for (source, dtype), alike in kinds.items():
            table = np.zeros((alike[0][1].num_layers, len(alike), 6), np.int64)
            spans, sizes = [], [1] * len(table)
            for number, ((row, count, offset), _, parts) in enumerate(alike):
                for stored, layers in parts:
                    for column, tensors in ((0, stored.keys), (3, stored.values)):
                        for rank, tensor in enumerate(tensors):
                            steps = np.arange(len(layers)) * (tensor.stride(0) * tensor.itemsize)
                            table[layers, number, column + rank] = tensor.data_ptr() + steps
                    for layer in layers:
                        sizes[layer] = stored.value_size
                keys, group = parts[0][0].keys, parts[0][0].key_size
                groups = keys[1].shape[2] if len(keys) > 1 else 1
                spans.append([row, count, keys[0].stride(1) // keys[0].shape[3], group, groups, offset])
            if (table[:, :, [0, 3]] % ALIGNED).any():
                return None
            longest = max(span[1] for span in spans)
            on_device = torch.from_numpy(table).to(device), torch.tensor(spans, device=device)
            launches.append(_Launch(*on_device, longest, source, dtype, sizes))
        return cls(launches)

    def place(
        self, layer: int, angles: Angles | None, keys: Tensor, values: Tensor, slots: Tensor | None = None, own: int = 0
    ) -> None:
        """Write a layer's rotated keys, and its values.

        angles:       at the tokens' positions, of a family that pairs halves; None: the layer does not rotate
        keys, values: [num_kv_heads, num_tokens, dim] each, or [num_kv_heads, num_pages, page_tokens, dim] with `slots`;
                      any strides
        slots:        int64 [num_tokens], the slots to write to
        own:          the blocks' head that is written to the first head here
        """
        page = 0 if slots is None else keys.shape[2]
        if slots is None:
            keys, values, slots = keys[:, None], values[:, None], keys  # slots are not read
        key_dim, value_dim = keys.shape[3], values.shape[3]
        half = 0 if angles is None else angles.half or 0
        cos, sin = (keys, keys) if angles is None else angles[:2]
        widths = (max(1, width) for width in (half, key_dim - 2 * half, value_dim))
        rounded = [triton.next_power_of_2(width) for width in widths]
        for one in self._launches:
            grid = (one.table.shape[1], triton.cdiv(one.longest, TILE), keys.shape[0])
            _place[grid](
                one.table, one.spans, slots, cos, sin, keys, values, layer, own,
                *keys.stride(), *values.stride(), page, one.value_sizes[layer], key_dim, value_dim, half,
                _TYPES[one.source], _TYPES[one.dtype], TILE, *rounded,
                enable_fp_fusion=False,  # a code is scaled and shifted in two roundings, as in every other decoder
            )  # fmt: skip


def _readable(parts: Sequence[Stored], device: torch.device) -> bool:
    """Return whether the device can read all of a block's tensors by address, in the layout that `_place` expects."""
    numbers = [tensors[0] for stored in parts for tensors in (stored.keys, stored.values)]
    scales = [tensor for stored in parts for tensors in (stored.keys, stored.values) for tensor in tensors[1:]]
    return (
        all(tensor.device.type == device.type or tensor.is_pinned() for tensor in (*numbers, *scales))
        and all(tensor.stride()[2:] == (tensor.shape[3], 1) and tensor.dtype == numbers[0].dtype for tensor in numbers)
        and len({tensor.stride(1) // tensor.shape[3] for tensor in numbers}) == 1
        and all(scale.dtype == torch.float16 and scale.is_contiguous() for scale in scales)
    )
