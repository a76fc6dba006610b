"""A tier in memory of some kind, under a byte budget."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ragcache.errors import check_least
from ragcache.kv.block import KVBlock
from ragcache.runtime import torch
from ragcache.store.eviction import Entry, EvictionPolicy
from ragcache.store.ledger import ByteLedger, Claim, leased, never
from ragcache.store.tiers.tier import Tier, TierUsage

if TYPE_CHECKING:
    from torch import Tensor


# Called with a victim's key and block while its bytes are counted still.
Demote = Callable[[str, KVBlock], None]


def drop(_key: str, _block: KVBlock) -> None:
    return


class BudgetedTier(Tier):
    """Private copies of blocks.

    A block is copied when it comes in, once, to contiguous memory that the copy itself has faulted in: pages of a
    mapped file are not host memory (the kernel may drop them), and a slice of a batch would keep the batch alive.

    budget_bytes is never exceeded, not for a moment: room is made and reserved before the copy begins. Every block that
    is handed out is in use until its tensors are gone. What is in use or pinned is never evicted; what is deleted
    while it is in use is counted until it is not. A block larger than the room that can be made for it, or not worth
    what would have to go, is not kept, and nothing is evicted for it.

    demote:    takes what is evicted, before it is let go of; may be set later
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
        self._leaving: dict[str, dict[str, KVBlock]] = {}  # and with which others
        self._lock = threading.Lock()

    @property
    def budget_bytes(self) -> int:
        return self._ledger.budget_bytes

    @property
    def evictions(self) -> int:
        return self._ledger.evictions

    @abstractmethod
    def _copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy where this tier keeps its blocks."""

    def put(self, key: str, block: KVBlock) -> KVBlock | None:
        entry = Entry(key, block.num_bytes, block.num_tokens)
        claim = self._claim(entry)
        if claim is None:
            return None
        try:
            self._let_go(*claim)
            held = block.map(self._copy)
        except BaseException:
            with self._lock:
                self._ledger.give_back(entry.num_bytes)
            raise
        with self._lock:
            self._forget(key)  # another thread may have put the same key meanwhile
            self._blocks[key] = held
            self._ledger.add(entry)
            return self._lent(key, held)

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
        """Whether the block is being evicted, and nobody has deleted it since."""
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

    def _claim(self, entry: Entry) -> tuple[Claim, dict[str, KVBlock]] | None:
        """The claim, and the blocks of its victims, which nobody else holds."""
        with self._lock:
            self._forget(entry.key)
            claim = self._ledger.claim(entry)
            if claim is None:
                return None
            going = {victim.key: self._blocks.pop(victim.key) for victim in claim.victims}
            self._leaving |= dict.fromkeys(going, going)
            return claim, going

    def _let_go(self, claim: Claim, going: dict[str, KVBlock]) -> None:
        """Hand the victims down, and let go of them."""
        try:
            for key in list(going):
                if self._leaving.get(key) is going:  # else it was deleted, or put and evicted once more
                    self.demote(key, going[key])
                del going[key]
        finally:
            with self._lock:
                for victim in claim.victims:
                    if self._leaving.get(victim.key) is going:
                        del self._leaving[victim.key]
                going.clear()
                self._ledger.settle(claim)

    def _forget(self, key: str) -> None:
        if self._blocks.pop(key, None) is not None:
            self._ledger.remove(key)


# Host memory under a byte budget.


class MemoryTier(BudgetedTier):
    """Blocks in host memory.

    page_locked: new copies are in memory that a CUDA device reads without a detour
    """

    name = "memory"
    page_locked: bool = False

    def on_device(self, device: torch.device) -> None:
        self.page_locked = self.page_locked or device.type == "cuda"

    def _copy(self, tensor: Tensor) -> Tensor:
        return private_copy(tensor, pin_memory=self.page_locked)


def private_copy(tensor: Tensor, **where: Any) -> Tensor:
    """where: options of `torch.empty`"""
    return torch.empty(tensor.shape, dtype=tensor.dtype, **where).copy_(tensor.detach())


# The model's own device under a byte budget.


log = logging.getLogger(__name__)
RETRY_AFTER = 64


class DeviceTier(BudgetedTier):
    """Blocks where the model runs, so that placing them moves nothing between host and device. They stay in their
    codec's bytes.

    A device without memory left is no error: the block stays in the tiers below, one warning is logged, and the tier
    makes do with the bytes that it has by then. After RETRY_AFTER blocks that it turned away for that it tries its
    whole budget again.
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

    def _copy(self, tensor: Tensor) -> Tensor:
        return private_copy(tensor, device=self.device)

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
