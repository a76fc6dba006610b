"""Uniform asymmetric quantisation in groups: what KIVI calls group-wise quantisation.

For a group X with zero point z_X and scale s_X of B bits (KIVI, section 3; 2402.02750):

    Q(X) = round((X - z_X) / s_X)     X' = Q(X) * s_X + z_X     z_X = min X     s_X = (max X - min X) / (2^B - 1)

z_X and s_X are rounded to the dtype that they are stored in before anything is quantised: z_X down and s_X up, so that
the grid still covers the group and |X - X'| <= s_X / 2 holds for the stored s_X.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragcache.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


# Up to here zero points and scales are float16: above, a restored float16 might overflow.
_HALF_LIMIT = 2.0**15


def group_size(length: int, largest: int) -> int:
    """Groups of like size, none larger than `largest`; the last one may be a little smaller."""
    return -(-length // num_groups(length, largest)) if length else 1


def num_groups(length: int, largest: int) -> int:
    return -(-length // largest)


def parameter_dtype(numbers: Tensor) -> torch.dtype:
    """Dtype in which the zero points and scales of these numbers are stored."""
    largest = float(numbers.abs().max()) if numbers.numel() else 0.0
    return torch.float16 if largest <= _HALF_LIMIT else torch.float32


def quantise(numbers: Tensor, dim: int, size: int, levels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to `levels` of groups of `size` neighbours along `dim`, uint8 in the shape of the numbers; their scales
    and zero points, with the grouped dimension by group.

    numbers: float32 of any shape, finite; dim: counted from the front
    dtype:   of zero points and scales, see `parameter_dtype`
    """
    grouped = _grouped(numbers, dim, size)
    low, high = torch.aminmax(grouped, dim=dim + 1) if grouped.numel() else (grouped.sum(dim + 1),) * 2
    zeros = _rounded(low.double(), dtype, -1)
    scales = rounded_up((high.double() - zeros.double()) / levels, dtype)
    step = scales.float().unsqueeze(dim + 1)
    codes = (grouped - zeros.float().unsqueeze(dim + 1)).div_(torch.where(step > 0, step, 1)).round_()
    codes = codes.clamp_(0, levels).to(torch.uint8).flatten(dim, dim + 1).narrow(dim, 0, numbers.shape[dim])
    return codes, scales, zeros


def restore(out: Tensor, dim: int, size: int, scales: Tensor, zeros: Tensor) -> None:
    """Replace the codes in `out` (float32) by numbers. scales, zeros: float32, as `quantise` shapes them."""
    if scales.shape[dim] == 1:  # the usual case, and the views below take as long as the arithmetic
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
    # Two steps, never a fused multiply-add: its single rounding would make other bits.
    out.mul_(scales)
    out.add_(zeros)


def _grouped(numbers: Tensor, dim: int, size: int) -> Tensor:
    """The dimension cut into [groups, size]; a last group that is too small is filled up with its last number."""
    missing = -numbers.shape[dim] % size
    if missing:
        last = numbers.narrow(dim, numbers.shape[dim] - 1, 1)
        numbers = torch.cat([numbers, last.expand(*last.shape[:dim], missing, *last.shape[dim + 1 :])], dim)
    return torch.unflatten(numbers, dim, (numbers.shape[dim] // size, size))


def rounded_up(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 numbers in float16 or float32, none of them smaller."""
    return _rounded(numbers, dtype, 1)


def _rounded(numbers: Tensor, dtype: torch.dtype, sign: int) -> Tensor:
    """Rounded to `dtype`, or to the neighbour where that lies on the wrong side: none larger for sign -1, nor smaller
    for 1."""
    exact = numbers.numpy()
    rounded: NDArray[Any] = exact.astype({torch.float16: np.float16, torch.float32: np.float32}[dtype])
    wrong = rounded * np.float64(sign) < exact * sign
    return torch.from_numpy(np.where(wrong, np.nextafter(rounded, rounded.dtype.type(sign * np.inf)), rounded))
