"""Eviction policies and admission filters by name."""

from __future__ import annotations

from ragcache.errors import check_choice
from ragcache.store.eviction.admission import CountMinSketch as CountMinSketch
from ragcache.store.eviction.admission import TinyLFU as TinyLFU
from ragcache.store.eviction.base import Entry as Entry
from ragcache.store.eviction.base import EvictionPolicy as EvictionPolicy
from ragcache.store.eviction.gdsf import GDSF as GDSF
from ragcache.store.eviction.gdsf import PGDSF as PGDSF
from ragcache.store.eviction.lfu import LFU as LFU
from ragcache.store.eviction.lru import LRU as LRU

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "lfu": LFU, "gdsf": GDSF, "pgdsf": PGDSF}
ADMISSIONS: dict[str, type[TinyLFU] | None] = {"all": None, "tinylfu": TinyLFU}


def get_policy(name: str, admission: str = "all") -> EvictionPolicy:
    """A fresh policy, behind an admission filter unless all are admitted. Raises ConfigError that names those there
    are."""
    check_choice("eviction policy", name, sorted(POLICIES))
    check_choice("admission filter", admission, ADMISSIONS)
    policy, admit = POLICIES[name](), ADMISSIONS[admission]
    return policy if admit is None else admit(policy)
