"""Whole numbers of a few bits, as KIVI quantises a KV cache (2402.02750).

Keys have channels with large numbers, the same channels in every token, so keys are quantised by channel, in groups of
tokens. Values have none, and a token's error must not depend on other tokens, so values are quantised by token, in
groups of channels. Keys are kept before RoPE here; RoPE would mix each pair of channels with the position. KIVI keeps
the last tokens of a growing cache exact; a stored block does not grow, so it needs no exact tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ragcache.codecs.affine import group_size, num_groups, pack, parameter_dtype, quantise, restore, unpack
from ragcache.codecs.layered import PARTS, BlockSpec, LayerCodec, Part, PartShape, expect, unit_roundoff
from ragcache.kv.block import Stored
from ragcache.lazy_torch import Tensor, torch

_HALF_BYTES = 2  # bytes of a scale, and of a zero point
_GROUPED = {"keys": 2, "values": 3}  # of [num_layers, num_kv_heads, num_tokens, head_dim]


class KiviCodec(LayerCodec):
    """Codes, with a scale and a zero point for each group.

    bits:    of a code: 8, or 4 or 2, of which two or four share a byte
    largest: the most numbers in a group: tokens for keys, channels for values

    Tensors, for keys and for values: `codes`, uint8 [num_layers, num_kv_heads, num_tokens, head_dim], with half the
    rows for 4 bits and a quarter for 2; `scales` and `zeros`, [num_layers, num_kv_heads, groups, head_dim] for keys,
    [num_layers, num_kv_heads, num_tokens, groups] for values, float16 unless the numbers are too large for float16.

    Bound: half a group's scale, plus the rounding of the result to the block's dtype.
    """

    part_names: ClassVar[frozenset[str]] = frozenset({"codes", "scales", "zeros"})
    rounds_states: ClassVar[bool] = True
    bits: ClassVar[int]
    largest: ClassVar[dict[Part, int]]

    def encode_part(self, part: Part, numbers: Tensor) -> dict[str, Tensor]:
        dim, levels, dtype = _GROUPED[part], 2**self.bits - 1, parameter_dtype(numbers)
        size = group_size(numbers.shape[dim], self.largest[part])
        layers = [quantise(layer.float(), dim - 1, size, levels, dtype) for layer in numbers]
        codes, scales, zeros = (torch.stack(tensors) for tensors in zip(*layers, strict=True))
        return {"codes": pack(codes, self.bits), "scales": scales, "zeros": zeros}

    def check_part(self, part: Part, tensors: Mapping[str, Tensor], spec: BlockSpec) -> None:
        shape = spec.shape(part)
        dim = _GROUPED[part]
        groups = num_groups(shape[dim], self.largest[part])
        rows = -(-shape[2] * self.bits // 8)
        expect(tensors, "codes", (*shape[:2], rows, shape[3]), torch.uint8)
        for name in ("scales", "zeros"):
            expect(tensors, name, (*shape[:dim], groups, *shape[dim + 1 :]), torch.float16, torch.float32)

    def decode_part(self, part: Part, tensors: Mapping[str, Tensor], layer: int, out: Tensor) -> None:
        codes = tensors["codes"][layer].to(out.device, non_blocking=True)
        scales, zeros = (
            tensors[name][layer].to(out.device, torch.float32, non_blocking=True) for name in ("scales", "zeros")
        )
        unpack(codes, self.bits, out)
        dim = _GROUPED[part] - 1
        restore(out, dim, group_size(out.shape[dim], self.largest[part]), scales, zeros)

    def stored(self, parts: Mapping[Part, Mapping[str, Tensor]], spec: BlockSpec) -> Stored | None:
        if self.bits != 8:
            return None
        keys, values = (tuple(parts[part][name] for name in ("codes", "scales", "zeros")) for part in PARTS)
        sizes = group_size(spec.num_tokens, self.largest["keys"]), group_size(spec.value_dim, self.largest["values"])
        return Stored(keys, values, *sizes)

    def part_bound(self, part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        scales, zeros = tensors["scales"].double(), tensors["zeros"].double()
        if not scales.numel():
            return 0.0
        highest = zeros.abs() + scales * (2**self.bits - 1)
        return float((scales * (0.5 + 2.0**-12) + highest * unit_roundoff(dtype)).max())

    def expected_part_bytes(self, part: Part, shape: PartShape) -> float:
        codes = shape._replace(num_tokens=-(-shape.num_tokens * self.bits // 8)).numbers
        length = shape[_GROUPED[part]]
        groups = shape.numbers // max(1, length) * num_groups(length, self.largest[part])
        return codes + groups * 2 * _HALF_BYTES


class Int8Codec(KiviCodec):
    """8 bits. Groups are large: a channel's own range in a whole passage, or a token's in a whole head, is enough."""

    name: ClassVar[str] = "int8"
    version: ClassVar[int] = 1
    bits: ClassVar[int] = 8
    largest: ClassVar[dict[Part, int]] = {"keys": 512, "values": 128}


class Int4Codec(KiviCodec):
    """4 bits in groups of 64: 4.5 bits a number including scales and zero points."""

    name: ClassVar[str] = "int4"
    version: ClassVar[int] = 1
    bits: ClassVar[int] = 4
    largest: ClassVar[dict[Part, int]] = {"keys": 64, "values": 64}
