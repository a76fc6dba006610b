"""Bases: what a codec learns from a store's own passages, and cannot decode its blocks without.

A basis is kept as a block whose tokens are the rows of a transform, so that every tier keeps, checks and moves it like
all other blocks.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from ragcache.codecs.transform import Group, groups_of
from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Unpacked codes that are kept for the next layer: a prompt's passages are read layer by layer.
RECENT_BYTES = 64 << 20


class Basis:
    """A basis by its groups. Raises DamagedBlockError for a block that is none."""

    def __init__(self, block: KVBlock) -> None:
        self._groups: dict[tuple[int, str, int, int, int], tuple[Group, ...]] = {}
        for number, part in enumerate(_parts(block)):
            for kind, rows in (("keys", part.keys), ("values", part.values)):
                layers, heads, _, width = rows.shape
                self._groups[number, kind, layers, heads, width] = groups_of(rows)

    def groups(self, number: int, part: str, shape: tuple[int, ...]) -> tuple[Group, ...] | None:
        """The groups of keys or values of this shape, [num_layers, num_kv_heads, num_tokens, head_dim]; None where the
        basis was made from other layers. number: of the part, in blocks whose layers differ"""
        layers, heads, _, width = shape
        return self._groups.get((number, part, layers, heads, width))


class Bases:
    """Bases by name, read when they are first needed.

    name:   of the basis that new blocks are encoded with; None: there is none yet
    recent: codes of the last blocks that were decoded

    Safe to call from several threads.
    """

    def __init__(self, load: Callable[[str], KVBlock | None] = lambda _name: None, name: str | None = None) -> None:
        """load: gives the block of a basis, or None"""
        self.name = name
        self.recent = Recent(RECENT_BYTES)
        self._load = load
        self._held: dict[str, Basis] = {}
        self._lock = threading.Lock()

    def add(self, block: KVBlock) -> str:
        """Encode new blocks with this basis; returns its name. Nothing is stored. Raises DamagedBlockError."""
        name = basis_name(block)
        self._held[name] = Basis(block)
        self.name = name
        return name

    def get(self, name: str) -> Basis:
        """Raises DamagedBlockError for one that cannot be found or read: its blocks have to be computed again."""
        with self._lock:
            found = self._held.get(name)
            if found is None:
                block = self._load(name)
                if block is None:
                    raise DamagedBlockError(f"basis {name} is gone: what it encoded has to be computed again")
                found = self._held[name] = Basis(block)
        return found


class Recent:
    """Codes that were unpacked last, `budget_bytes` of them at most: the layers of a group are restored one after
    another from the same ones."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held: OrderedDict[tuple[int, int], tuple[weakref.ref[Tensor], Tensor]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, stream: Tensor, group: int, unpack: Callable[[], Tensor]) -> Tensor:
        """The codes of a group of the block that has this stream."""
        key = id(stream), group
        with self._lock:
            found = self._held.get(key)
            if found is not None and found[0]() is stream:
                self._held.move_to_end(key)
                return found[1]
        codes = unpack()
        with self._lock:
            if key in self._held:
                self._num_bytes -= self._held.pop(key)[1].nbytes
            self._held[key] = weakref.ref(stream), codes
            self._num_bytes += codes.nbytes
            while self._num_bytes > self._budget_bytes:
                self._num_bytes -= self._held.popitem(last=False)[1][1].nbytes
        return codes


def basis_name(block: KVBlock) -> str:
    """64 hex digits that depend on the rows alone; they are the basis's block key."""
    state = hashlib.sha256()
    for part in _parts(block):
        for rows in (part.keys, part.values):
            state.update(f"{rows.dtype} {tuple(rows.shape)} ".encode())
            state.update(rows.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _parts(block: KVBlock) -> tuple[KVBlock, ...]:
    return block.parts if isinstance(block, MixedBlock) else (block,)
