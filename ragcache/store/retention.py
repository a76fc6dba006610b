"""Time to live: blocks that were unused for this time are dropped."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from ragcache.errors import ConfigError
from ragcache.store.tiers import DurableTier

MARKS_PER_LIFE = 16  # how often the durable tier records the use of a block within its time to live, at most
_MOST_KNOWN = 1 << 17


@dataclass(eq=False, repr=False)
class Expiry:
    """The last uses of blocks, and which blocks have expired.

    This process's uses are timed by a clock that never jumps, other processes' uses are those that the durable tier
    records. The wall clock is read once, so its later changes have no effect. A recorded use in the future counts as a
    use now, and is corrected. If the wall clock was wrong when the process began, a block can look too old: it is then
    computed again.

    ttl_s: seconds without use after which a block expires; None: no block expires, and no use is recorded
    """

    ttl_s: float | None
    durable: DurableTier
    _: KW_ONLY
    writable: bool = True
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.ttl_s is not None and (not self.ttl_s > 0 or math.isinf(self.ttl_s)):
            raise ConfigError(f"a time to live of {self.ttl_s} s: give more than 0, or None to keep blocks")
        self._offset_s = self.wall() - self.clock()
        self._used_at: dict[str, float] = {}
        self._marked_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def use(self, key: str) -> None:
        """Record that the block is used now. The durable tier is updated occasionally, not at every use."""
        if self.ttl_s is None:
            return
        now, often_s = self._now(), self.ttl_s / MARKS_PER_LIFE
        with self._lock:
            self._used_at[key] = now
            mark = now - self._marked_at.get(key, -math.inf) >= often_s
            if mark:
                self._marked_at[key] = now
            if len(self._used_at) > _MOST_KNOWN:  # the durable tier knows the last uses of old ones
                for old in [known for known, at in self._used_at.items() if at <= now - often_s]:
                    del self._used_at[old]
                    self._marked_at.pop(old, None)
        if mark:
            self._mark(key, now)

    def is_over(self, key: str) -> bool:
        """Return whether the block was unused for its time to live. A block of unknown last use has not expired."""
        if self.ttl_s is None:
            return False
        now = self._now()
        last = self._used_at.get(key)
        if last is None or now - last >= self.ttl_s:
            marked = self.durable.used_at(key)
            if marked is not None and marked > now:
                self._mark(key, marked := now)
            last = max((at for at in (last, marked) if at is not None), default=None)
        return last is not None and now - last >= self.ttl_s

    def forget(self, key: str) -> None:
        """Forget this process's uses of a block that was deleted."""
        with self._lock:
            self._used_at.pop(key, None)
            self._marked_at.pop(key, None)

    def _mark(self, key: str, now: float) -> None:
        if self.writable:
            self.durable.mark_used(key, now)

    def _now(self) -> float:
        return self.clock() + self._offset_s
