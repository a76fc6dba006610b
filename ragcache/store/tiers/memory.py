"""Tiers in host or device memory, under a byte budget."""

from __future__ import annotations

import logging
import resource
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ragcache.errors import check_least, first_line
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import torch
from ragcache.store.eviction import Entry, EvictionPolicy
from ragcache.store.last_use import leased
from ragcache.store.ledger import ByteLedger, never
from ragcache.store.tiers.tier import DurableTier, Room, Tier, TierUsage

if TYPE_CHECKING:
    from torch import Tensor


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

    demote:    called with each victim before it is freed; may be set later
    is_pinned: whether a key is never evicted
    """

    demote: Demote

    def __init__(
        self,
        budget_bytes: int,
        policy: EvictionPolicy,
        *,
        demote: Demote = drop,
        is_pinned: Callable[[str], bool] = never,
    ) -> None:
        check_least(f"{self.name}_bytes", budget_bytes, 0)
        self.demote = demote
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
            claim = self._ledger.claim(Entry(room.key, num_bytes, 0))
            if claim is None:
                return False
            room.num_bytes, room.is_spare = num_bytes, not claim.victims
            going = {victim.key: self._blocks.pop(victim.key) for victim in claim.victims}
            self._leaving |= dict.fromkeys(going, going)
        try:
            for key in list(going):
                if self._leaving.get(key) is going:  # otherwise it was deleted, or put and evicted again
                    self.demote(key, going[key])
                del going[key]
        finally:
            with self._lock:
                for victim in claim.victims:
                    if self._leaving.get(victim.key) is going:
                        del self._leaving[victim.key]
                going.clear()
                self._ledger.settle(claim)
        return True

    def _forget(self, key: str) -> None:
        if self._blocks.pop(key, None) is not None:
            self._ledger.remove(key)


@dataclass(eq=False, repr=False)
class BudgetedRoom(Room):
    """Bytes claimed from a tier's budget (num_bytes), returned at the end of the `with` block unless they hold a block
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
            self.tier._ledger.give_back(self.num_bytes)


# Host memory under a byte budget.


class MemoryTier(BudgetedTier):
    """A tier in host memory.

    page_locked: new copies are in page-locked memory, which a CUDA device reads directly, while the system grants it
    """

    name = "memory"
    page_locked: bool = False

    def on_device(self, device: torch.device) -> None:
        self.page_locked = self.page_locked or device.type == "cuda"

    def taken(self, num_bytes: int) -> int:
        """Round up to a power of two if page-locked, as PyTorch's allocator does."""
        return 1 << (num_bytes - 1).bit_length() if self.page_locked and num_bytes else num_bytes

    def read(self, key: str, tier: DurableTier) -> KVBlock | None:
        """Read a block of `tier` directly into this tier's memory if it has room; otherwise read it, then `put` it."""
        with BudgetedRoom(self, key) as room:
            block = tier.get(key, room)
            if block is not None and room.buffer is not None and _lies_in(block, room.buffer):
                return room.hold(block)
        return None if block is None else self.put(key, block) or block

    def _made(self, make: Callable[..., Tensor]) -> Tensor:
        if not self.page_locked:
            return make()
        try:
            return make(pin_memory=True)
        except RuntimeError as error:
            with self._lock:
                is_first, self.page_locked = self.page_locked, False
            if is_first:
                limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                log.warning(
                    "the system page-locks no more memory (%s; limit: %s): further KV blocks are in ordinary memory, "
                    "which a GPU reads more slowly; raise the limit (ulimit -l unlimited, docker run --ulimit "
                    "memlock=-1), or give --memory less",
                    first_line(error), "none" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes",
                )  # fmt: skip
            return make()


def _lies_in(block: KVBlock, buffer: Tensor) -> bool:
    """Return whether all of the block's tensors lie in the buffer."""
    own = buffer.untyped_storage().data_ptr()
    return all(one.untyped_storage().data_ptr() == own for one in block.held_tensors() if one.numel())


def private_copy(tensor: Tensor, **where: Any) -> Tensor:
    """Return a contiguous copy of a tensor. where: options of `torch.empty`"""
    return torch.empty(tensor.shape, dtype=tensor.dtype, **where).copy_(tensor.detach())


# The model's own device under a byte budget.


log = logging.getLogger(__name__)
RETRY_AFTER = 64


class DeviceTier(BudgetedTier):
    """A tier in the memory of the model's device, so that using a block moves nothing from the host. Blocks stay
    encoded by their codec.

    A device without free memory is not an error: the block stays in the slower tiers, one warning is logged, and the
    tier's budget shrinks to the bytes in use at that time. After RETRY_AFTER further refused blocks the whole budget is
    tried again.
    """

    name = "device"

    def __init__(self, device: torch.device, budget_bytes: int, policy: EvictionPolicy, **options: Any) -> None:
        super().__init__(budget_bytes, policy, **options)
        self.device = device
        self._whole_budget = budget_bytes
        self._turned_away = 0
        self._warned = False

    def put(self, key: str, block: KVBlock) -> KVBlock | None:
        try:
            held = super().put(key, block)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._shrink(error)
            return None
        if held is None and self.budget_bytes < self._whole_budget:
            with self._lock:
                self._turned_away += 1
                if self._turned_away >= RETRY_AFTER:
                    self._turned_away = 0
                    self._ledger.budget_bytes = self._whole_budget
        return held

    def _made(self, make: Callable[..., Tensor]) -> Tensor:
        return make(device=self.device)

    def _shrink(self, error: BaseException) -> None:
        with self._lock:
            self._ledger.collect()
            self._ledger.budget_bytes = self._ledger.used_bytes
            self._turned_away = 0
            first, self._warned = not self._warned, True
        if first:
            log.warning(
                "%s has no memory left for KV blocks (%s); the device tier goes on with %d of %d bytes, the other "
                "blocks stay in host memory: give --device-memory less",
                self.device, str(error).partition("\n")[0], self.budget_bytes, self._whole_budget,
            )  # fmt: skip
