"""Uniform asymmetric quantisation in groups, which KIVI calls group-wise quantisation, and its codes packed into bytes.

For a group X with zero point z_X and scale s_X of B bits (KIVI, section 3; 2402.02750):

    Q(X) = round((X - z_X) / s_X)     X' = Q(X) * s_X + z_X     z_X = min X     s_X = (max X - min X) / (2^B - 1)

z_X and s_X are rounded to their stored dtype before anything is quantised: z_X down and s_X up, so that the grid still
covers the group and |X - X'| <= s_X / 2 holds for the stored s_X.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache.lazy_torch import Tensor, torch

# Up to this number zero points and scales are float16; above it, a restored float16 might overflow.
_HALF_LIMIT = 2.0**15


def group_size(length: int, largest: int) -> int:
    """Return the size of nearly equal groups of at most `largest`; the last group may be slightly smaller."""
    return -(-length // num_groups(length, largest)) if length else 1


def num_groups(length: int, largest: int) -> int:
    return -(-length // largest)


def parameter_dtype(numbers: Tensor) -> torch.dtype:
    """Return the dtype in which the zero points and scales of these numbers are stored."""
    largest = float(numbers.abs().max()) if numbers.numel() else 0.0
    return torch.float16 if largest <= _HALF_LIMIT else torch.float32


def quantise(numbers: Tensor, dim: int, size: int, levels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0 to `levels` for groups of `size` neighbours along `dim`, with their scales and zero points.

    numbers: float32 of any shape, finite, on the CPU
    dim:     counted from the front
    dtype:   of zero points and scales, see `parameter_dtype`

    Returns codes, scales and zero points. Codes are uint8 in the shape of the numbers; scales and zero points have one
    number for each group along `dim`.
    """
    grouped = _grouped(numbers, dim, size)
    low, high = torch.aminmax(grouped, dim=dim + 1) if grouped.numel() else (grouped.sum(dim + 1),) * 2
    zeros = _rounded(low.double(), dtype, -1)
    scales = _rounded((high.double() - zeros.double()) / levels, dtype, 1)
    step = scales.float().unsqueeze(dim + 1)
    codes = (grouped - zeros.float().unsqueeze(dim + 1)).div_(torch.where(step > 0, step, 1)).round_()
    codes = codes.clamp_(0, levels).to(torch.uint8).flatten(dim, dim + 1).narrow(dim, 0, numbers.shape[dim])
    return codes, scales, zeros


def restore(out: Tensor, dim: int, size: int, scales: Tensor, zeros: Tensor) -> None:
    """Replace the codes in `out`, float32, by the numbers that they stand for.

    dim, size:     as given to `quantise`
    scales, zeros: float32, in the shape that `quantise` returns
    """
    if scales.shape[dim] == 1:  # the usual case; the views below would take as long as the arithmetic
        _scale(out, scales, zeros)
        return
    whole = out.shape[dim] // size
    if whole:
        grouped = torch.unflatten(out.narrow(dim, 0, whole * size), dim, (whole, size))
        _scale(grouped, scales.narrow(dim, 0, whole).unsqueeze(dim + 1), zeros.narrow(dim, 0, whole).unsqueeze(dim + 1))
    if rest := out.shape[dim] - whole * size:
        tail = out.narrow(dim, whole * size, rest)
        _scale(tail, scales.narrow(dim, whole, 1), zeros.narrow(dim, whole, 1))


def _scale(out: Tensor, scales: Tensor, zeros: Tensor) -> None:
    # Two steps, never a fused multiply-add: its single rounding would give other bits.
    out.mul_(scales)
    out.add_(zeros)


def _grouped(numbers: Tensor, dim: int, size: int) -> Tensor:
    """Split the dimension into [groups, size]; a last group that is too small is padded with its last number."""
    missing = -numbers.shape[dim] % size
    if missing:
        last = numbers.narrow(dim, numbers.shape[dim] - 1, 1)
        numbers = torch.cat([numbers, last.expand(*last.shape[:dim], missing, *last.shape[dim + 1 :])], dim)
    return torch.unflatten(numbers, dim, (numbers.shape[dim] // size, size))


def _rounded(numbers: Tensor, dtype: torch.dtype, sign: int) -> Tensor:
    """Round float64 numbers to float16 or float32, never up for sign -1 and never down for sign 1."""
    exact = numbers.numpy()
    rounded: NDArray[Any] = exact.astype({torch.float16: np.float16, torch.float32: np.float32}[dtype])
    wrong = rounded * np.float64(sign) < exact * sign
    return torch.from_numpy(np.where(wrong, np.nextafter(rounded, rounded.dtype.type(sign * np.inf)), rounded))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack as many codes into a byte as fit: the first part of the tokens into the lowest bits, and so on.

    [..., num_tokens, dim] -> [..., ceil(num_tokens * bits / 8), dim]. A byte holds codes from different parts of the
    tokens, not from neighbouring tokens, so that packing and unpacking move whole runs of bytes.
    """
    rows = -(-codes.shape[-2] * bits // 8)
    packed = codes[..., :rows, :].clone()
    for place in range(1, 8 // bits):
        part = codes[..., place * rows : (place + 1) * rows, :]
        packed[..., : part.shape[-2], :] |= part << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int, out: Tensor) -> None:
    """Write the codes that `pack` has packed to `out`, [..., num_tokens, dim] in any dtype that holds them."""
    if bits == 8:
        out.copy_(packed)
        return
    rows, places = packed.shape[-2], 8 // bits
    for place in range(places):
        part = out[..., place * rows : (place + 1) * rows, :]
        codes = packed[..., : part.shape[-2], :]
        codes = codes >> (place * bits) if place else codes
        part.copy_(codes & (2**bits - 1) if place < places - 1 else codes)
