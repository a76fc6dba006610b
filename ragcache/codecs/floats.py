"""Sixteen-bit floating point, for models that run in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ragcache.codecs.layered import BlockSpec, LayerCodec, Part, PartShape, expect, unit_roundoff
from ragcache.lazy_torch import Tensor, torch

_ROUNDOFF = 2.0**-8  # 8 bits of significand
_LEAST = 2.0**-134  # half of bfloat16's smallest step


class Bfloat16Codec(LayerCodec):
    """X' = bfloat16(X): half the bytes of float32, with its range. A block in bfloat16 stays unchanged.

    Tensors, for keys and for values: `numbers`, bfloat16 of the block's shape.

    Bound: 2^-8 of the largest number, plus the rounding of the result to the block's dtype.
    """

    name: ClassVar[str] = "bfloat16"
    version: ClassVar[int] = 1
    part_names: ClassVar[frozenset[str]] = frozenset({"numbers"})

    def encode_part(self, part: Part, numbers: Tensor) -> dict[str, Tensor]:
        return {"numbers": numbers.to(torch.bfloat16)}

    def check_part(self, part: Part, tensors: Mapping[str, Tensor], spec: BlockSpec) -> None:
        expect(tensors, "numbers", spec.shape(part), torch.bfloat16)

    def decode_part(self, part: Part, tensors: Mapping[str, Tensor], layer: int, out: Tensor) -> None:
        out.copy_(tensors["numbers"][layer], non_blocking=True)

    def part_bound(self, part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        if not tensors["numbers"].numel() or dtype == torch.bfloat16:
            return 0.0
        return float(tensors["numbers"].abs().max()) * (_ROUNDOFF + unit_roundoff(dtype)) + _LEAST

    def expected_part_bytes(self, part: Part, shape: PartShape) -> float:
        return 2 * shape.numbers
