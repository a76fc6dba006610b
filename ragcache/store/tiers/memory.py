"""Host memory under a byte budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragcache.lazy import torch
from ragcache.store.tiers.budgeted import BudgetedTier

if TYPE_CHECKING:
    from torch import Tensor


class MemoryTier(BudgetedTier):
    """Blocks in host memory.

    page_locked: new copies are in memory that a CUDA device reads without a detour
    """

    name = "memory"
    page_locked: bool = False

    def on_device(self, device: torch.device) -> None:
        self.page_locked = self.page_locked or device.type == "cuda"

    def _copy(self, tensor: Tensor) -> Tensor:
        return private_copy(tensor, page_locked=self.page_locked)


def private_copy(tensor: Tensor, *, page_locked: bool = False) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=page_locked)
    return copy.copy_(tensor.detach())
