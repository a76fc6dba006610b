"""Attention in bfloat16 on a CPU, by our own kernel (ragcache/native/attention.cpp)."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ragcache import native

_INSTRUCTIONS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma")
_ARGUMENTS = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 7 + [ctypes.c_float]


@cache
def prepare() -> ctypes.CDLL | None:
    """Return the kernel's library, which is compiled first if necessary; None if the kernel is not used here.

    It is not used if it cannot be compiled, and if PyTorch's own kernels are as good: on a processor without
    AVX512-BF16, or with AMX, which PyTorch uses.
    """
    if not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    if (library := native.load("attention", *_INSTRUCTIONS)) is not None:
        library.ragcache_attend.argtypes = _ARGUMENTS
        library.ragcache_attend.restype = None
    return library


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, num_own: int, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Compute softmax(q k^T * scaling) v and the logarithm of the softmax's denominator, without a mask.

    query: [batch, num_heads, num_rows, head_dim]; key, value: [batch, num_kv_heads, length, head_dim]
    num_own: 0: every row sees every key; num_rows: the rows' own keys are the last keys, and each row sees the keys up
             to its own

    Returns float32 [batch, num_heads, num_rows, head_dim] and [batch, num_heads, num_rows]; None if the kernel does
    not support these tensors, or is not available.
    """
    batch, num_heads, num_rows, width = query.shape
    num_kv_heads, length = key.shape[1:3]
    is_supported = (
        query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and length > 0
        and value.shape[3] == width
        and width % 16 == 0
        and all(_is_in_rows(tensor) for tensor in (key, value))
        and not torch.is_grad_enabled()
    )
    if not is_supported or (library := prepare()) is None:
        return None
    folded = query.reshape(batch * num_kv_heads, -1, width).contiguous()
    out = torch.empty(batch, num_heads, num_rows, width)
    lse = torch.empty(batch, num_heads, num_rows)
    pointers = [tensor.data_ptr() for tensor in (folded, key, value, out, lse)]
    sizes = (len(folded), folded.shape[1], length, width, num_own, key.stride(1), value.stride(1))
    library.ragcache_attend(*pointers, *sizes, scaling)
    return out, lse


def _is_in_rows(tensor: Tensor) -> bool:
    """Return whether a head's tokens follow each other, and all heads of the batch are at equal distances."""
    batch, num_heads, _, width = tensor.shape
    return tensor.stride()[2:] == (width, 1) and (batch == 1 or tensor.stride(0) == num_heads * tensor.stride(1))
