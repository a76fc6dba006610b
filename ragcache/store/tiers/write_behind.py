"""A durable tier whose `put` does not wait for the disk, or the network, below it."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator

from ragcache.errors import check_least
from ragcache.kv.block import KVBlock
from ragcache.runtime import Home, work_alone
from ragcache.store.counters import WarnOnce
from ragcache.store.ledger import leased
from ragcache.store.tiers.disk_budget import check_key
from ragcache.store.tiers.memory import private_copy
from ragcache.store.tiers.tier import DurableTier, ForwardingTier, Room

log = logging.getLogger(__name__)
_MOST_FAILED = 1024
_EXIT_S = 10.0  # a store that hangs must not keep the process


class WriteBehind(ForwardingTier):
    """Takes blocks into host memory, and a thread writes them to another durable tier, oldest first.

    tier:        where they are written
    bound_bytes: of the blocks that wait, or are in use since they waited. It is never exceeded: `put` waits until
                 others are written, and writes itself what does not fit even then

    Until a block is flushed a kill loses it, whole; `flush` and `close` wait for all. What cannot be written (a full
    disk, one that turned read-only) is dropped with a warning: it is computed again, and `flush` raises the error.
    """

    writes_late = True

    def __init__(self, tier: DurableTier, bound_bytes: int) -> None:
        check_least("write_behind_bytes", bound_bytes, 0)
        super().__init__(tier)
        self.bound_bytes = bound_bytes
        self._pending: dict[str, KVBlock] = {}
        self._failed: dict[str, Exception] = {}
        self._writing: str | None = None
        self._used_bytes = 0
        self._released: deque[int] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._writer: threading.Thread | None = None
        self._complaints = WarnOnce(log)
        self._home = Home("this store was opened", "open it")

    @property
    def unwritten_bytes(self) -> int:
        with self._changed:
            while self._released:
                self._used_bytes -= self._released.popleft()
            return self._used_bytes

    def put(self, key: str, block: KVBlock, *, encoded: bool = False, flushed: bool = False) -> KVBlock | None:
        """Returns before the block is on disk, unless it is to be flushed, or there is no room for it here."""
        self._home.check()
        check_key(key)
        if flushed:
            self._cancel(key)
            return self.tier.put(key, block, encoded=encoded, flushed=True)
        block = block if encoded else self.tier.roundtrip(key, block)
        if not self._reserve(block.num_bytes):
            self._cancel(key)
            return self.tier.put(key, block, encoded=True)
        num_bytes, released = block.num_bytes, self._released
        held = leased(block.map(private_copy), lambda: released.append(num_bytes))
        with self._changed:
            self._pending[key] = held
            self._failed.pop(key, None)
            if self._writer is None:
                # A daemon: a process that ends without `close` loses what a kill would lose.
                self._writer = threading.Thread(target=self._run, name="ragcache-write-behind", daemon=True)
                atexit.register(self._end_with_process)
                self._writer.start()
            self._changed.notify_all()
        return held

    def get(self, key: str, room: Room | None = None) -> KVBlock | None:
        with self._changed:
            waiting = self._pending.get(key)
        return self.tier.get(key, room) if waiting is None else waiting

    def delete(self, key: str) -> None:
        self._cancel(key)
        self.tier.delete(key)

    def flush(self, keys: Iterable[str] | None = None) -> None:
        self._home.check()
        wanted = None if keys is None else set(keys)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting(wanted))
            failed = [key for key in self._failed if wanted is None or key in wanted]
            errors = [self._failed.pop(key) for key in failed]
        if errors:
            raise errors[0]

    def verify(self, key: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting({key}))
        self.tier.verify(key)

    def sizes(self, keys: Iterable[str], *, written: bool = False) -> dict[str, int]:
        wanted, waiting = list(keys), {} if written else dict(self._pending)
        here = {key: waiting[key].num_bytes for key in wanted if key in waiting}
        return here | self.tier.sizes([key for key in wanted if key not in here], written=written)

    def keys(self) -> Iterator[str]:
        with self._changed:
            waiting = list(self._pending)
        return iter(dict.fromkeys([*waiting, *self.tier.keys()]))

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
        atexit.unregister(self._end_with_process)
        super().close()

    def _end_with_process(self) -> None:
        """Drop what waits, and let the writer finish its block: a daemon that the interpreter ends within PyTorch
        aborts the process ("terminate called without an active exception"). A fork has no writer."""
        if not self._home.is_here:
            return
        with self._changed:
            self._pending.clear()
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(_EXIT_S)

    def _reserve(self, num_bytes: int) -> bool:
        """Wait for room; False when all is written and there is none: what is left of it is in use."""
        with self._changed:
            while self.unwritten_bytes + num_bytes > self.bound_bytes:
                if self._closing or num_bytes > self.bound_bytes or not self._waiting(None):
                    return False
                self._changed.wait()
            self._used_bytes += num_bytes
            return True

    def _waiting(self, wanted: set[str] | None) -> bool:
        if wanted is None:
            return bool(self._pending) or self._writing is not None
        return self._writing in wanted or not wanted.isdisjoint(self._pending)

    def _cancel(self, key: str) -> None:
        """The block is not going to be written any more, and is not being written."""
        with self._changed:
            self._pending.pop(key, None)
            self._changed.wait_for(lambda: self._writing != key)
            self._pending.pop(key, None)

    def _run(self) -> None:
        work_alone()
        while (key := self._next()) is not None:
            self._write(key)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pending) or self._closing)
            self._writing = next(iter(self._pending), None)
            return self._writing

    def _write(self, key: str) -> None:
        with self._changed:
            block = self._pending.get(key)
        failure: Exception | None = None
        try:
            if block is not None:
                self.tier.put(key, block, encoded=True)
                self._complaints.worked()
        except Exception as error:  # whatever it is: a writer that ends would leave all waiting
            failure = error
            self._complaints.failed(f"block {key} cannot be written, and is computed again when it is needed", error)
        with self._changed:
            if failure is not None:
                self._failed[key] = failure
                while len(self._failed) > _MOST_FAILED:
                    del self._failed[next(iter(self._failed))]
            if self._pending.get(key) is block:
                self._pending.pop(key, None)
            self._writing = None
            del block  # its bytes are free before those who wait look
            self._changed.notify_all()
