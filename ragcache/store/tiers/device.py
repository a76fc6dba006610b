"""The model's own device under a byte budget."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ragcache.kv.block import KVBlock
from ragcache.lazy import torch
from ragcache.store.eviction import EvictionPolicy
from ragcache.store.tiers.budgeted import BudgetedTier

if TYPE_CHECKING:
    from torch import Tensor

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
            self._count_refusal()
        return held

    def _copy(self, tensor: Tensor) -> Tensor:
        return _device_copy(tensor, self.device)

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

    def _count_refusal(self) -> None:
        with self._lock:
            self._turned_away += 1
            if self._turned_away >= RETRY_AFTER:
                self._turned_away = 0
                self._ledger.budget_bytes = self._whole_budget


def _device_copy(tensor: Tensor, device: torch.device) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return copy.copy_(tensor.detach())
