"""Demotion of blocks that a tier gives up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from ragcache.errors import StoreError
from ragcache.kv.block import KVBlock
from ragcache.store.complaints import Complaints
from ragcache.store.key_locks import KeyLocks
from ragcache.store.tiers import BudgetedTier, DurableTier, Tier

log = logging.getLogger(__name__)


class Demotion:
    """Hands what a tier evicts to the next slower one, and sees that nothing comes to the durable tier which does not
    belong there: a passing block is never written, and one that was written late, when its document had been deleted by
    another process, is deleted again (law 10). Thread-safe.

    referenced: which of some keys chunks refer to; None: all of them
    """

    def __init__(
        self,
        durable: DurableTier,
        key_locks: KeyLocks,
        *,
        read_only: bool,
        referenced: Callable[[Iterable[str]], set[str]] | None,
    ) -> None:
        self._durable = durable
        self._key_locks = key_locks
        self._read_only = read_only
        self._referenced = referenced
        self._passing: set[str] = set()  # held in memory for a moment, and never to be written
        self._late: set[str] = set()  # written since the last look at what is referenced
        self._complaints = Complaints(log)
        self._lock = threading.Lock()

    @property
    def knows_references(self) -> bool:
        return self._referenced is not None

    def demote(self, above: BudgetedTier, below: Tier, key: str, block: KVBlock) -> None:
        """Hand a block down, unless the slower tier has it or somebody works on the key: reads, makes or deletes it."""
        if key in below or (below is self._durable and not self._is_to_be_written(key)):
            return
        with self._key_locks.try_hold(key) as free:
            if not free or not above.is_leaving(key):
                return
            try:
                if below is self._durable:
                    self._write(key, block)
                else:
                    below.put(key, block)
            except (StoreError, OSError) as error:
                self._complaints.failed(f"block {key} is not written, and is computed again when it is needed", error)

    def passes(self, key: str) -> None:
        """The block is held for a moment."""
        with self._lock:
            self._passing.add(key)

    def stays(self, key: str, *, late: bool = False) -> None:
        """The block is written, or deleted. late: it is written after the caller has gone on."""
        with self._lock:
            self._passing.discard(key)
            if late:
                self._late.add(key)

    def wanted(self, keys: Iterable[str]) -> set[str]:
        """Blocks in memory that may stay there although the durable tier has them no more."""
        with self._lock:
            known = set(keys) - self._passing
        return self._referenced(known) if self._referenced is not None and known else set()

    def delete_late(self) -> None:
        """Delete what was written after its document was deleted by another process, which did not find it."""
        with self._lock:
            late, self._late = self._late, set()
        if self._referenced is None or not late:
            return
        try:
            for key in late - self._referenced(late):
                with self._key_locks.hold(key):
                    self._durable.delete(key)
        except (StoreError, OSError) as error:
            with self._lock:
                self._late |= late
            log.warning("blocks of deleted documents may be left; `ragcache doctor` collects them: %s", error)

    def _write(self, key: str, block: KVBlock) -> None:
        if self._referenced is None or self._referenced([key]):
            self._durable.put_as_held(key, block)
            with self._lock:
                self._late.add(key)
        self._complaints.worked()

    def _is_to_be_written(self, key: str) -> bool:
        with self._lock:
            passing = key in self._passing
            self._passing.discard(key)
        return not (passing or self._read_only)
