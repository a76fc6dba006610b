"""Host memory under a byte budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ragcache.errors import ConfigError
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import Entry, EvictionPolicy
from ragcache.store.tiers.base import Tier, Usage


class MemoryTier(Tier):
    """Private copies of blocks in host memory.

    A block is copied when it comes in, once, to contiguous memory that the copy itself has faulted in: pages of a
    mapped file are not host memory (the kernel may drop them), and a slice of a batch would keep the batch alive.

    budget_bytes is never exceeded, not for a moment: room is made and reserved before the copy begins. A block larger
    than the budget, or not worth what would have to go for it, is not kept, and nothing is evicted for it. What is
    evicted while an answer still uses it lives on outside the budget until the answer lets go of it.
    """

    name: ClassVar[str] = "memory"
    durable: ClassVar[bool] = False

    def __init__(self, budget_bytes: int, policy: EvictionPolicy) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"a memory budget of {budget_bytes} bytes: give 0 (keep nothing) or more")
        self.budget_bytes = budget_bytes
        self.evictions = 0
        self._policy = policy
        self._blocks: dict[str, KVBlock] = {}
        self._used_bytes = 0  # held and reserved
        self._lock = threading.Lock()

    def put(self, key: str, block: KVBlock) -> KVBlock | None:
        if not self._reserve(key, block.num_bytes):
            return None
        try:
            held = block.map(_private_copy)
        except BaseException:
            self._release(block.num_bytes)
            raise
        with self._lock:
            self._forget(key)  # another thread may have put the same key meanwhile
            self._blocks[key] = held
            self._policy.insert(Entry(key, held.num_bytes, held.num_tokens))
        return held

    def get(self, key: str) -> KVBlock | None:
        with self._lock:
            self._policy.touch(key)
            return self._blocks.get(key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._forget(key)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def size(self, key: str) -> int | None:
        block = self._blocks.get(key)
        return None if block is None else block.num_bytes

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._blocks))

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._blocks), self._used_bytes)

    def close(self) -> None:
        with self._lock:
            for key in list(self._blocks):
                self._forget(key)

    def _reserve(self, key: str, num_bytes: int) -> bool:
        """Take num_bytes from the budget, evicting for it; False, with nothing evicted, when that cannot be done."""
        with self._lock:
            self._forget(key)
            victims = self._victims(self._used_bytes + num_bytes - self.budget_bytes)
            if victims is None or not self._policy.admits(key, victims):
                return False
            for victim in victims:
                self._policy.evict(victim)
                self._forget(victim)
            self.evictions += len(victims)
            self._used_bytes += num_bytes
            return True

    def _victims(self, excess_bytes: int) -> list[str] | None:
        """Keys whose blocks make up at least excess_bytes, or None when all together do not."""
        victims: list[str] = []
        for key in self._policy.victims() if excess_bytes > 0 else ():
            victims.append(key)
            excess_bytes -= self._blocks[key].num_bytes
            if excess_bytes <= 0:
                break
        return victims if excess_bytes <= 0 else None

    def _forget(self, key: str) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._policy.remove(key)
            self._used_bytes -= block.num_bytes

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes


def _private_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())
