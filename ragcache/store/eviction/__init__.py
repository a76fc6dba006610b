"""Eviction policies by name."""

from __future__ import annotations

from ragcache.errors import ConfigError
from ragcache.store.eviction.base import Entry, EvictionPolicy
from ragcache.store.eviction.lru import LRU

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU}


def get_policy(name: str) -> EvictionPolicy:
    """A fresh policy. Raises ConfigError that names those there are."""
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r} is unknown; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()


__all__ = ["LRU", "POLICIES", "Entry", "EvictionPolicy", "get_policy"]
