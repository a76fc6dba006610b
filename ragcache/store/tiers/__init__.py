"""Tiers that hold blocks: durable tiers by name, and the tiers in memory above them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ragcache.codecs import Codec
from ragcache.errors import check_choice
from ragcache.seal import Seal
from ragcache.store.eviction import EvictionPolicy
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

# Arguments: root (the store's directory), codec (of new blocks), budget_bytes (None: unlimited), policy (which blocks
# to evict), is_pinned (which keys never to evict), seal (of the store).
OpenDurable = Callable[[Path, Codec, int | None, EvictionPolicy, Callable[[str], bool], Seal], DurableTier]

DURABLE: dict[str, OpenDurable] = {"disk": DiskTier}


def get_durable(name: str) -> OpenDurable:
    """Return the function that opens the durable tier called `name`. Raises ConfigError that lists the known names."""
    check_choice("durable tier", name, sorted(DURABLE))
    return DURABLE[name]
