"""Bases: data that a codec learns from a store's own passages, and needs to decode its blocks.

A basis is stored as a block, so that every tier stores, checks and moves it like any other block. Only its codec knows
the meaning of its numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TypeVar

from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.lazy_torch import torch

_T = TypeVar("_T")


class Bases:
    """Bases by name, read when they are first needed. Thread-safe.

    name: name of the basis that new blocks are encoded with; None: there is no basis yet
    """

    def __init__(self, load: Callable[[str], KVBlock | None] = lambda _name: None, name: str | None = None) -> None:
        """Create the bases. load: returns the block of the basis with this name, or None if it is missing"""
        self.name = name
        self._load = load
        self._blocks: dict[str, KVBlock] = {}
        self._held: dict[str, object] = {}
        self._lock = threading.Lock()

    def add(self, block: KVBlock) -> str:
        """Encode new blocks with this basis, and return its name. Nothing is stored."""
        self.name = basis_name(block)
        self._blocks[self.name] = block
        return self.name

    def get(self, name: str, read: Callable[[KVBlock], _T]) -> _T:
        """Return `read(block)` for the block of the basis called `name`.

        The result is kept by name and returned by later calls, so every call must pass the same function.

        Raises DamagedBlockError if the basis is missing or damaged: the blocks that were encoded with it have to be
        computed again.
        """
        with self._lock:
            if name not in self._held:
                block = self._blocks.get(name) or self._load(name)
                if block is None:
                    raise DamagedBlockError(f"basis {name} is gone: blocks encoded with it have to be computed again")
                self._held[name] = read(block)
            return self._held[name]  # type: ignore[return-value]


def basis_name(block: KVBlock) -> str:
    """Return the name of a basis, which is its block key: 64 hex digits that depend only on its tensors."""
    state = hashlib.sha256()
    for part in block.parts if isinstance(block, MixedBlock) else (block,):
        for rows in (part.keys, part.values):
            state.update(f"{rows.dtype} {tuple(rows.shape)} ".encode())
            state.update(rows.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
