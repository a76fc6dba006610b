"""The tier in the memory of the model's device, under a byte budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import Tensor, torch
from ragcache.store.eviction import EvictionPolicy
from ragcache.store.tiers.budgeted import BudgetedTier

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
