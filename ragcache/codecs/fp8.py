"""Eight-bit floating point with a scale for each channel of keys and each token of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ragcache.codecs.affine import rounded_up
from ragcache.codecs.layered import PARTS, BlockSpec, LayerCodec, Part, PartShape, expect, unit_roundoff
from ragcache.kv.block import Stored
from ragcache.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


_LARGEST = 448.0  # of float8_e4m3fn: 1.75 * 2^8
_SCALED_BY = {"keys": 2, "values": 3}  # the dimension along which numbers share a scale


class Fp8Codec(LayerCodec):
    """X' = fp8(X / s) * s with s = max |X| / 448, rounded up.

    e4m3 (FP8 Formats for Deep Learning, 2209.05433) has 3 bits of fraction: small numbers keep their relative
    precision, which evenly spaced codes do not give.

    Tensors, for keys and for values: `codes`, float8_e4m3fn of the block's shape; `scales`, float32, [num_layers,
    num_kv_heads, 1, head_dim] for keys and [num_layers, num_kv_heads, num_tokens, 1] for values.

    Bound: 16 s for the largest numbers of a group (half of e4m3's last step, 32), plus the rounding of the result to
    the block's dtype.
    """

    name: ClassVar[str] = "fp8"
    version: ClassVar[int] = 1
    part_names: ClassVar[frozenset[str]] = frozenset({"codes", "scales"})
    rounds_states: ClassVar[bool] = True

    def encode_part(self, part: Part, numbers: Tensor) -> dict[str, Tensor]:
        layers = [_scaled(layer.float(), _SCALED_BY[part] - 1) for layer in numbers]
        codes, scales = (torch.stack(tensors) for tensors in zip(*layers, strict=True))
        return {"codes": codes, "scales": scales}

    def check_part(self, part: Part, tensors: Mapping[str, Tensor], spec: BlockSpec) -> None:
        shape = spec.shape(part)
        dim = _SCALED_BY[part]
        expect(tensors, "codes", shape, torch.float8_e4m3fn)
        expect(tensors, "scales", (*shape[:dim], 1, *shape[dim + 1 :]), torch.float32)

    def decode_part(self, part: Part, tensors: Mapping[str, Tensor], layer: int, out: Tensor) -> None:
        codes, scales = (tensors[name][layer].to(out.device, non_blocking=True) for name in ("codes", "scales"))
        out.copy_(_halves(codes))
        out.mul_(scales * 2.0**8)

    def stored(self, parts: Mapping[Part, Mapping[str, Tensor]], spec: BlockSpec) -> Stored:
        keys, values = (tuple(parts[part][name] for name in ("codes", "scales")) for part in PARTS)
        return Stored(keys, values, max(1, spec.num_tokens), max(1, spec.value_dim))

    def part_bound(self, part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        scales = tensors["scales"].double()
        if not scales.numel():
            return 0.0
        return float(scales.max()) * (16 * (1 + 2.0**-12) + _LARGEST * unit_roundoff(dtype))

    def expected_part_bytes(self, part: Part, shape: PartShape) -> float:
        return shape.numbers + 4 * shape.numbers // max(1, shape[_SCALED_BY[part]])


def _halves(codes: Tensor) -> Tensor:
    """Return the codes / 2^8 as float16, exactly: sign, exponent and fraction are moved to float16's places.

    The exponents' biases are 7 and 15. On a CPU torch converts float8 a number at a time, twenty times slower.
    """
    moved = codes.view(torch.int8).to(torch.int16) << 7  # the sign, extended, fills the upper two bits
    return (moved & -0x4001).view(torch.float16)


def _scaled(numbers: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if not numbers.numel():
        shape = [1 if axis == dim else size for axis, size in enumerate(numbers.shape)]
        return numbers.to(torch.float8_e4m3fn), torch.zeros(shape)
    highest = numbers.abs().amax(dim, keepdim=True)
    scales = rounded_up(highest.double() / _LARGEST, torch.float32)
    codes = (numbers / torch.where(scales > 0, scales, 1)).clamp_(-_LARGEST, _LARGEST)
    return codes.to(torch.float8_e4m3fn), scales
