"""Where block bytes live."""

from __future__ import annotations

from ragcache.store.tiers.base import Tier, Usage
from ragcache.store.tiers.budgeted import BudgetedTier
from ragcache.store.tiers.device import DeviceTier
from ragcache.store.tiers.disk import DiskTier
from ragcache.store.tiers.memory import MemoryTier

__all__ = ["BudgetedTier", "DeviceTier", "DiskTier", "MemoryTier", "Tier", "Usage"]
