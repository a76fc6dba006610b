"""Detect when a block's bytes are no longer used."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import Tensor, torch


def leased(block: KVBlock, release: Callable[[], object]) -> KVBlock:
    """Return the same block with new tensors that alias the old ones; nothing is copied.

    `release` is called once, in any thread and at any point of its execution, when the new tensors and all their views
    are freed. It must not take a lock. Detached views of tensors outside plain host memory are not tracked.
    """
    token = _Token()
    weakref.finalize(token, release).atexit = False
    return block.map(lambda tensor: _alias(tensor, token))


class _Token:
    """An object that lives as long as the aliases."""


class _Memory:
    """A tensor's bytes for NumPy, whose arrays over them keep this object alive. The bytes are freed before the token:
    once the token is freed, their space may be reused."""

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
    if not tensor.numel():  # frombuffer refuses empty buffers, and no bytes are in use
        return tensor
    # Page-locked memory: the allocator has to know its own storage, to wait for copies that are under way.
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_pinned():
        return _alias_of_storage(tensor, token)
    buffer = np.asarray(_Memory(tensor.detach(), token))
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)


def _alias_of_storage(tensor: Tensor, token: _Token) -> Tensor:
    """Return a tensor that is not a view: its views hold it as their base, so it outlives them."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    weakref.finalize(alias, _hold, token).atexit = False
    return alias


def _hold(token: _Token) -> None:
    """Keep the token alive: a finalizer holds its arguments until it is called."""
