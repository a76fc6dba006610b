"""The base of tiers in memory under a byte budget."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from ragcache.errors import check_least
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import Tensor, torch
from ragcache.store.eviction import Entry, EvictionPolicy
from ragcache.store.last_use import leased
from ragcache.store.ledger import ByteLedger, never
from ragcache.store.tiers.tier import Room, Tier, TierUsage

# Called with a victim's key and block while its bytes still count.
Demote = Callable[[str, KVBlock], None]


def drop(_key: str, _block: KVBlock) -> None:
    return


class BudgetedTier(Tier):
    """A tier that holds private copies of blocks under a byte budget.

    A block is copied once, when it is stored, to contiguous memory that the copy itself has faulted in: pages of a
    mapped file are not host memory (the kernel may drop them), and a slice of a batch would keep the batch alive.

    budget_bytes is never exceeded, not for a moment: space is reserved before the copy begins. Every returned block is
    in use until its tensors are freed. Blocks in use and pinned blocks are never evicted; a block deleted while in use
    is counted until its use ends. A block that is larger than the space that can be freed, or worth less than its
    victims, is not kept, and nothing is evicted for it.

    demote:    called with each victim before it is freed; it does nothing until the tier's owner sets it
    is_pinned: whether a key is never evicted
    """

    demote: Demote

    def __init__(
        self,
        budget_bytes: int,
        policy: EvictionPolicy,
        *,
        is_pinned: Callable[[str], bool] = never,
    ) -> None:
        check_least(f"{self.name}_bytes", budget_bytes, 0)
        self.demote = drop
        self._ledger = ByteLedger(budget_bytes, policy, is_pinned)
        self._blocks: dict[str, KVBlock] = {}
        self._leaving: dict[str, dict[str, KVBlock]] = {}  # key -> the eviction's victims, this block among them
        self._lock = threading.Lock()

    @property
    def budget_bytes(self) -> int:
        return self._ledger.budget_bytes

    @property
    def evictions(self) -> int:
        return self._ledger.evictions

    @abstractmethod
    def _made(self, make: Callable[..., Tensor]) -> Tensor:
        """Return a tensor in this tier's memory, made by `make`, which takes options of `torch.empty`."""

    def empty(self, num_bytes: int) -> Tensor:
        return self._made(partial(torch.empty, num_bytes, dtype=torch.uint8))

    def taken(self, num_bytes: int) -> int:
        """Return the bytes of memory that a tensor of num_bytes occupies."""
        return num_bytes

    def put(self, key: str, block: KVBlock) -> KVBlock | None:
        num_bytes = sum(self.taken(tensor.nbytes) for tensor in block.held_tensors())
        with BudgetedRoom(self, key) as room:
            if not self.make_room(room, num_bytes):
                return None
            return room.hold(block.map(lambda tensor: self._made(partial(private_copy, tensor))))

    def _hold(self, entry: Entry, held: KVBlock) -> KVBlock:
        with self._lock:
            self._forget(entry.key)  # another thread may have put the same key meanwhile
            self._blocks[entry.key] = held
            self._ledger.add(entry)
            return self._lent(entry.key, held)

    def get(self, key: str) -> KVBlock | None:
        with self._lock:
            self._ledger.touch(key)
            held = self._blocks.get(key)
            return None if held is None else self._lent(key, held)

    def delete(self, key: str) -> None:
        with self._lock:
            self._leaving.pop(key, None)
            self._forget(key)

    def is_leaving(self, key: str) -> bool:
        """Return whether the block is being evicted and has not been deleted since."""
        return key in self._leaving

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def size(self, key: str) -> int | None:
        block = self._blocks.get(key)
        return None if block is None else block.num_bytes

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._blocks))

    def usage(self) -> TierUsage:
        with self._lock:
            self._ledger.collect()
            return TierUsage(len(self._blocks), self._ledger.used_bytes)

    def close(self) -> None:
        with self._lock:
            for key in list(self._blocks):
                self._forget(key)

    def _lent(self, key: str, held: KVBlock) -> KVBlock:
        return leased(held, self._ledger.lease(key))

    def make_room(self, room: BudgetedRoom, num_bytes: int) -> bool:
        """Reserve bytes, demoting and freeing the victims; return False, changing nothing, if that is impossible."""
        with self._lock:
            self._forget(room.key)
            reservation = self._ledger.reserve(Entry(room.key, num_bytes, 0))
            if reservation is None:
                return False
            room.num_bytes, room.is_spare = num_bytes, not reservation.victims
            going = {victim.key: self._blocks.pop(victim.key) for victim in reservation.victims}
            self._leaving |= dict.fromkeys(going, going)
        try:
            for key in list(going):
                if self._leaving.get(key) is going:  # otherwise it was deleted, or put and evicted again
                    self.demote(key, going[key])
                del going[key]
        finally:
            with self._lock:
                for victim in reservation.victims:
                    if self._leaving.get(victim.key) is going:
                        del self._leaving[victim.key]
                going.clear()
                self._ledger.settle(reservation)
        return True

    def _forget(self, key: str) -> None:
        if self._blocks.pop(key, None) is not None:
            self._ledger.remove(key)


@dataclass(eq=False, repr=False)
class BudgetedRoom(Room):
    """Bytes reserved from a tier's budget (num_bytes), returned at the end of the `with` block unless they hold a block
    by then."""

    tier: BudgetedTier
    key: str
    num_bytes: int = 0
    is_spare: bool = False
    buffer: Tensor | None = None

    def take(self, num_bytes: int) -> Tensor | None:
        self.buffer = self.tier.empty(num_bytes) if self.tier.make_room(self, self.tier.taken(num_bytes)) else None
        return self.buffer

    def hold(self, block: KVBlock) -> KVBlock:
        num_bytes, self.num_bytes = self.num_bytes, 0
        return self.tier._hold(Entry(self.key, num_bytes, block.num_tokens), block)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self.tier._lock:
            self.tier._ledger.release(self.num_bytes)


def private_copy(tensor: Tensor, **where: Any) -> Tensor:
    """Return a contiguous copy of a tensor. where: options of `torch.empty`"""
    return torch.empty(tensor.shape, dtype=tensor.dtype, **where).copy_(tensor.detach())
