"""Tiers that hold blocks: durable tiers, and the tiers in memory above them."""

from __future__ import annotations

from ragcache.store.tiers.budgeted import BudgetedTier as BudgetedTier
from ragcache.store.tiers.device import DeviceTier as DeviceTier
from ragcache.store.tiers.disk import DiskTier as DiskTier
from ragcache.store.tiers.local_copy import CachedTier as CachedTier
from ragcache.store.tiers.memory import MemoryTier as MemoryTier
from ragcache.store.tiers.remote import RemoteTier as RemoteTier
from ragcache.store.tiers.tier import DurableTier as DurableTier
from ragcache.store.tiers.tier import Room as Room
from ragcache.store.tiers.tier import Tier as Tier
from ragcache.store.tiers.tier import TierUsage as TierUsage
