"""Codes of a few bits, packed into bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
