"""Time to live: blocks that were not used for so long go."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from ragcache.errors import ConfigError
from ragcache.store.tiers import DurableTier

MARKS_PER_LIFE = 16
_MOST_KNOWN = 1 << 17


@dataclass(eq=False, repr=False)
class Expiry:
    """Last uses of blocks: here by a clock that never jumps, by others as the durable tier says.

    The wall clock is read once. What it does while the process runs shows nowhere; a mark from the future counts as
    used now, and is set right. A wall clock that was wrong when the process began can make a block look too
    old: it is then computed again.

    ttl_s: None: no block is ever over, and none is marked
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
        """The block is used now. The durable tier is told now and then, not at every use."""
        if self.ttl_s is None:
            return
        now, often_s = self._now(), self.ttl_s / MARKS_PER_LIFE
        with self._lock:
            self._used_at[key] = now
            mark = now - self._marked_at.get(key, -math.inf) >= often_s
            if mark:
                self._marked_at[key] = now
            if len(self._used_at) > _MOST_KNOWN:  # the durable tier says as much of old ones
                for old in [known for known, at in self._used_at.items() if at <= now - often_s]:
                    del self._used_at[old]
                    self._marked_at.pop(old, None)
        if mark:
            self._mark(key, now)

    def is_over(self, key: str) -> bool:
        """Whether the block was used by nobody for its time to live. A block that is nowhere known is not over."""
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
        with self._lock:
            self._used_at.pop(key, None)
            self._marked_at.pop(key, None)

    def _mark(self, key: str, now: float) -> None:
        if self.writable:
            self.durable.mark_used(key, now)

    def _now(self) -> float:
        return self.clock() + self._offset_s
