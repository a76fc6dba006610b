"""The placing of blocks on a CPU's pages by a function in C++ (`ragcache/native/pages.cpp`)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragcache import native
from ragcache.fusion.place_check import SWITCH
from ragcache.kv.block import KVBlock
from ragcache.kv.rope import Angles

NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLAGS = {"AVX2": "-march=x86-64-v3", "AVX512": "-march=x86-64-v3"}
"""Flags of the compiler by capability of the processor, as PyTorch names it. The function needs instructions that
multiply and add in one step, by which it rounds as PyTorch does.
"""


def place_function() -> Callable[..., bool] | None:
    """Return the C++ function, compiled at its first use; None if it is switched off or cannot run on this machine."""
    flag = FLAGS.get(torch.backends.cpu.get_cpu_capability())
    if flag is None or os.environ.get(SWITCH) == "plain" or (library := native.load("pages", flag)) is None:
        return None
    function = library.ragcache_place
    number, address = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [address, number, *[address] * 3, number, *[address] * 2, *[number] * 5]
    function.restype = ctypes.c_bool
    return function


class HostKernel:
    """Places the tokens of some blocks one after another, by a call for each layer: `PlaceKernel` for a CPU.

    table: int64 [num_layers, num_blocks, 6], see `Part` in pages.cpp
    """

    codecs = ("raw",)

    def __init__(self, function: Callable[..., bool], table: Any, dtype: torch.dtype) -> None:
        self._function = function
        self._table = table
        self._dtype = dtype

    @classmethod
    def of(
        cls, blocks: Sequence[KVBlock], device: torch.device, parts_of: Sequence[tuple[int, int]]
    ) -> HostKernel | None:
        """Return the kernel over these blocks, or None.

        It is None if the kernel does not run here, or cannot read one of the blocks by its address; see `_is_readable`.

        parts_of: for each block, the first token to place and the number of tokens
        """
        function, dtype = place_function(), blocks[0].dtype
        if function is None or dtype not in NUMBERS or any(block.stored is None for block in blocks):
            return None
        table = np.empty((blocks[0].num_layers, len(blocks), 6), np.int64)
        first = 0
        for number, (block, (offset, count)) in enumerate(zip(blocks, parts_of, strict=True)):
            for stored, layers in block.stored or ():
                for column, tensors in ((0, stored.keys), (1, stored.values)):
                    if not _is_readable(tensors, dtype):
                        return None
                    (tensor,) = tensors
                    steps = np.arange(len(layers)) * tensor.stride(0) + offset * tensor.stride(2)
                    table[layers, number, column] = tensor.data_ptr() + steps * tensor.itemsize
                    table[layers, number, column + 2] = tensor.stride(1)
            table[:, number, 4:] = first, count
            first += count
        return cls(function, table, dtype)

    def place(
        self, layer: int, angles: Angles | None, keys: Tensor, values: Tensor, slots: Tensor, own: int = 0
    ) -> None:
        """Write a layer's rotated keys, and its values; see `PlaceKernel.place`.

        Raises ArithmeticError if keys or values have more channels than the function takes.
        """
        parts = self._table[layer]
        cos, sin, half = (None, None, 0) if angles is None else angles
        addresses = [None if angle is None else angle.data_ptr() for angle in (cos, sin)]
        placed = self._function(
            parts.ctypes.data, len(parts), slots.data_ptr(), *addresses, half, _pages(keys), _pages(values), own,
            keys.shape[0], keys.shape[2], NUMBERS[self._dtype], NUMBERS[keys.dtype],
        )  # fmt: skip
        if not placed:
            raise ArithmeticError(f"keys of {keys.shape[3]} and values of {values.shape[3]} channels are too wide")


def _is_readable(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Return whether these are a single tensor of `dtype` on the CPU, with the channels of each token side by side."""
    held = tensors[0]
    is_plain = len(tensors) == 1 and held.dtype == dtype and held.device.type == "cpu"
    return is_plain and held.stride()[2:] == (held.shape[3], 1)


def _pages(view: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Return the address, strides and width of a view of pages, as pages.cpp reads them."""
    return (ctypes.c_int64 * 6)(view.data_ptr(), *view.stride(), view.shape[3])
