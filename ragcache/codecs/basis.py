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
        """Create the bases. load: a function of a basis's name that returns its block, or None"""
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
        """Return the result of `read`, always the same function, for the basis's block.

        Raises DamagedBlockError if the basis cannot be found or read: its blocks then have to be computed again.
        """
        with self._lock:
            if name not in self._held:
                block = self._blocks.get(name) or self._load(name)
                if block is None:
                    raise DamagedBlockError(f"basis {name} is gone: what it encoded has to be computed again")
                self._held[name] = read(block)
            return self._held[name]  # type: ignore[return-value]


def basis_name(block: KVBlock) -> str:
    """Return 64 hex digits that depend only on the rows: the basis's block key."""
    state = hashlib.sha256()
    for part in block.parts if isinstance(block, MixedBlock) else (block,):
        for rows in (part.keys, part.values):
            state.update(f"{rows.dtype} {tuple(rows.shape)} ".encode())
            state.update(rows.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
