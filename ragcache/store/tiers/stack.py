"""Tiers one above the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ragcache.errors import DamagedBlockError, PinError, StoreError
from ragcache.kv.block import KVBlock
from ragcache.runtime import torch
from ragcache.store.counters import Loaded, WarnOnce
from ragcache.store.tiers import BudgetedTier, DurableTier, MemoryTier, Tier


class Stored(NamedTuple):
    """The fastest tier that has a block, and the bytes that reading it moves."""

    tier: str
    num_bytes: int


@dataclass(eq=False, repr=False)
class TierStack:
    """Any number of tiers in memory, fastest first, over a durable one and its caches. A block is read from the fastest
    tier that has it and kept in the faster ones from then on; what a tier evicts, `demotion` hands to the next slower
    one.

    As safe for several threads as its tiers are. Two calls for one key at once may leave a block in some tiers that was
    deleted from others: the caller locks the key.
    """

    durable: DurableTier
    demotion: Demotion
    memory: MemoryTier
    volatile: tuple[BudgetedTier, ...] = ()

    def __post_init__(self) -> None:
        self.push(self.memory)

    def __iter__(self) -> Iterator[Tier]:
        return iter((*self.volatile, *self.durable.caches, self.durable))

    def push(self, tier: BudgetedTier) -> None:
        """Make this the fastest tier."""
        below = self.volatile[0] if self.volatile else self.durable
        tier.demote = lambda key, block: self.demotion.demote(tier, below, key, block)
        self.volatile = (tier, *self.volatile)

    def on_device(self, device: torch.device) -> None:
        """Tell every tier where the model runs."""
        for tier in self:
            tier.on_device(device)

    def load(self, key: str, damaged: Callable[[str, Tier, DamagedBlockError], None]) -> Loaded | None:
        """The block from the fastest tier that can serve it, held by the faster ones from now on, or None.

        damaged: told of each tier whose block is damaged; the next tier is asked then
        """
        last = len(self.volatile) - 1
        for level, tier in enumerate(self):
            try:
                block = self.memory.read(key, tier) if isinstance(tier, DurableTier) else tier.get(key)
            except DamagedBlockError as error:
                damaged(key, tier, error)
                continue
            if block is not None:
                return Loaded(self._promote(key, block, min(level, last)), tier.name)
        return None

    def promote(self, key: str, block: KVBlock) -> KVBlock:
        """Hold in every tier in memory what the durable one would give back; returns the fastest copy that is kept."""
        return self._promote(key, block, len(self.volatile))

    def _promote(self, key: str, block: KVBlock, level: int) -> KVBlock:
        for tier in reversed(self.volatile[:level]):
            block = tier.put(key, block) or block
        return block

    def lookup(self, keys: Iterable[str], *, memory_only: bool = False) -> dict[str, Stored]:
        """What has each of these blocks, asked together; those that no tier has are left out. Verifies nothing.

        memory_only: ask no disk and no network
        """
        wanted, found = list(dict.fromkeys(keys)), dict[str, Stored]()
        for tier in self.volatile if memory_only else (*self.volatile, *self.durable.caches):
            rest = [key for key in wanted if key not in found]
            found |= {key: Stored(tier.name, size) for key in rest if (size := tier.size(key)) is not None}
        rest = [] if memory_only else [key for key in wanted if key not in found]
        kept = self.durable.sizes(rest) if rest else {}
        return found | {key: Stored(self.durable.name, size) for key, size in kept.items()}

    def drop_unwanted(self, *, copies: bool) -> int:
        """Let go of what no chunk refers to: copies on this machine, and in memory what the durable tier does not keep.
        Returns how many blocks left memory. copies: whether those on disk can be removed"""
        caches = self.durable.caches if copies and self.demotion.referenced is not None else ()
        here = [(tier, key) for tier in caches for key in list(tier.keys())]
        held = [(tier, key) for tier in self.volatile for key in list(tier.keys())]
        wanted = self.demotion.wanted(key for _, key in (*here, *held))
        for cache, key in here:
            if key not in wanted:
                cache.delete(key)
        gone = [(tier, key) for tier, key in held if key not in wanted and key not in self.durable]
        for tier, key in gone:
            tier.delete(key)
            self.demotion.stays(key)
        return len(gone)

    def refuse_too_many(self, pinned: frozenset[str]) -> None:
        """Raises PinError unless every tier has room beside the pinned blocks for one more of their largest size."""
        held = [stored.num_bytes for stored in self.lookup(pinned).values()]
        kept = list(self.durable.sizes(pinned).values())
        for tier in self:
            budget, sizes = tier.budget_bytes, kept if tier is self.durable else held
            if budget and budget < sum(sizes) + max(sizes, default=0):
                raise PinError(
                    f"{len(pinned)} pinned blocks of {sum(sizes):,} bytes would fill the {tier.name} tier of "
                    f"{budget:,} bytes; pin fewer, or give the tier more"
                )


# Demotion of blocks that a tier gives up.


log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Demotion:
    """Hands what a tier evicts to the next slower one, and sees that nothing comes to the durable tier which does not
    belong there: a passing block is never written, and one that was written when its document had been deleted by
    another process is deleted again (law 10). Thread-safe.

    referenced: which of some keys chunks refer to; None: all of them
    """

    durable: DurableTier
    key_locks: KeyLocks
    read_only: bool
    referenced: Callable[[Iterable[str]], set[str]] | None

    def __post_init__(self) -> None:
        self._passing: set[str] = set()  # held in memory for a moment, and never to be written
        self._late: set[str] = set()  # written since the last look at what is referenced
        self._complaints = WarnOnce(log)
        self._lock = threading.Lock()

    def demote(self, above: BudgetedTier, below: Tier, key: str, block: KVBlock) -> None:
        """Hand a block down, unless the slower tier has it or somebody works on the key: reads, makes or deletes it."""
        if key in below:
            return
        if below is self.durable:
            with self._lock:
                passing = key in self._passing
                self._passing.discard(key)
            if passing or self.read_only:
                return
        with self.key_locks.try_hold(key) as free:
            if not free or not above.is_leaving(key):
                return
            try:
                if below is self.durable:
                    self._write(key, block)
                else:
                    below.put(key, block)
            except (StoreError, OSError) as error:
                self._complaints.failed(f"block {key} is not written, and is computed again when it is needed", error)

    def passes(self, key: str) -> None:
        """The block is held for a moment."""
        with self._lock:
            self._passing.add(key)

    def stays(self, key: str) -> None:
        """Note that the block is written, or deleted."""
        with self._lock:
            self._passing.discard(key)

    def wanted(self, keys: Iterable[str]) -> set[str]:
        """Blocks in memory that may stay there although the durable tier has them no more."""
        with self._lock:
            known = set(keys) - self._passing
        return self.referenced(known) if self.referenced is not None and known else set()

    def delete_late(self) -> None:
        """Delete what was written after its document was deleted by another process, which did not find it."""
        with self._lock:
            late, self._late = self._late, set()
        if self.referenced is None or not late:
            return
        try:
            for key in late - self.referenced(late):
                with self.key_locks.hold(key):
                    self.durable.delete(key)
        except (StoreError, OSError) as error:
            with self._lock:
                self._late |= late
            log.warning("blocks of deleted documents may be left; `ragcache doctor` collects them: %s", error)

    def _write(self, key: str, block: KVBlock) -> None:
        if self.referenced is None or self.referenced([key]):
            self.durable.put(key, block, encoded=True)
            with self._lock:
                self._late.add(key)
        self._complaints.worked()


# One lock a key, there only while somebody wants it.


class KeyLocks:
    """Work on one key excludes other work on it; different keys do not wait for each other."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Not reentrant."""
        with self._guard:
            lock, waiting = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, waiting + 1)
        try:
            with lock:
                yield
        finally:
            self._leave(key)

    @contextmanager
    def try_hold(self, key: str) -> Iterator[bool]:
        """Same as `hold` where nobody works on the key; False, at once, where somebody does."""
        with self._guard:
            free = key not in self._locks
            if free:
                lock = threading.Lock()
                lock.acquire()
                self._locks[key] = (lock, 1)
        try:
            yield free
        finally:
            if free:
                lock.release()
                self._leave(key)

    def _leave(self, key: str) -> None:
        with self._guard:
            lock, waiting = self._locks.pop(key)
            if waiting > 1:
                self._locks[key] = (lock, waiting - 1)

    def __len__(self) -> int:
        return len(self._locks)
