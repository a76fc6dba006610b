"""Know when nobody uses a block's bytes any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def leased(block: KVBlock, release: Callable[[], object]) -> KVBlock:
    """The same block over tensors of their own, which alias the block's: nothing is copied.

    `release` is called once, in any thread and at any point of it, when these tensors and all views of them are gone.
    It must not take a lock. Of tensors that are not in plain host memory, detached views are not seen.
    """
    token = _Token()
    weakref.finalize(token, release).atexit = False
    return block.map(lambda tensor: _alias(tensor, token))


class _Token:
    """Lives as long as the aliases."""


class _Memory:
    """A tensor's bytes for NumPy, whose arrays over them keep this alive. The bytes go before the token does: once that
    is gone, somebody else may take their room."""

    def __init__(self, tensor: Tensor, token: _Token) -> None:
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self._tensor: Tensor | None = tensor
        self._token: _Token | None = token

    def __del__(self) -> None:
        self._tensor = None
        self._token = None


def _alias(tensor: Tensor, token: _Token) -> Tensor:
    if not tensor.numel():  # frombuffer takes no empty buffer, and there are no bytes to use
        return tensor
    # Page-locked memory: the allocator has to know its own storage, to wait for copies that are under way.
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_pinned():
        return _alias_of_storage(tensor, token)
    buffer = np.asarray(_Memory(tensor.detach(), token))
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)


def _alias_of_storage(tensor: Tensor, token: _Token) -> Tensor:
    """A tensor that is nobody's view: views of it hold it as their base, and it outlives them."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    weakref.finalize(alias, _hold, token).atexit = False
    return alias


def _hold(token: _Token) -> None:
    """Keep the token: a finalizer does until it is called."""
