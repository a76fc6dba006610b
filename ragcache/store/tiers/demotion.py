"""Demotion of evicted blocks to slower tiers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ragcache.errors import StoreError
from ragcache.kv.block import KVBlock
from ragcache.store.tiers import BudgetedTier, DurableTier, Tier
from ragcache.store.tiers.key_locks import KeyLocks
from ragcache.store.warn_once import WarnOnce

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Demotion:
    """The hand-over of evicted blocks to the next slower tier. It keeps blocks out of the durable tier that do not
    belong there: a passing block is never written, and a block written after another process deleted its document is
    deleted again (law 10). Thread-safe.

    referenced: returns which of the given keys chunks refer to; None: assume all are referenced
    """

    durable: DurableTier
    key_locks: KeyLocks
    read_only: bool
    referenced: Callable[[Iterable[str]], set[str]] | None

    def __post_init__(self) -> None:
        self._passing: set[str] = set()  # blocks in memory that must not be written
        self._late: set[str] = set()  # blocks written since the last check of references
        self._complaints = WarnOnce(log)
        self._lock = threading.Lock()

    def demote(self, above: BudgetedTier, below: Tier, key: str, block: KVBlock) -> None:
        """Hand a block down, unless the slower tier has it or its key is being read, made or deleted."""
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
        """Mark a block as passing: held in memory for a moment only."""
        with self._lock:
            self._passing.add(key)

    def stays(self, key: str) -> None:
        """Record that the block was written or deleted, so that it is not passing."""
        with self._lock:
            self._passing.discard(key)

    def wanted(self, keys: Iterable[str]) -> set[str]:
        """Return those of these blocks that may stay in memory although the durable tier lacks them.

        These are the blocks that chunks refer to, without the passing blocks.
        """
        with self._lock:
            known = set(keys) - self._passing
        return self.referenced(known) if self.referenced is not None and known else set()

    def delete_late(self) -> None:
        """Delete blocks that this process has written although no chunk refers to them any longer.

        Another process deleted their document before they were written, and so did not find them.
        """
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
