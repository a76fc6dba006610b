"""An eviction policy: uses over age."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ragcache.store.eviction import Entry, EvictionPolicy


@dataclass(slots=True)
class _Seen:
    """An entry that is held, or was evicted.

    uses: its number of uses, each weighted as in `Hyperbolic`
    last: the clock at its last use; the clock counts the uses of all entries
    """

    num_bytes: int
    uses: float = 0.0
    last: int = 0

    @property
    def group(self) -> int:
        """Return the number of the entry's group: entries of a group differ by at most a fifth in their uses."""
        return int(GROUPS * math.log2(self.uses))


GROUPS = 4  # a doubling of the uses
POWERS = (0.0, 4.0)  # the range of the power that uses are raised to; at 0 the policy is LRU
FIRST_POWER = 2.0
STEPS = 3.0  # the power changes by STEPS / entries at a time
GHOSTS = 1 << 16  # evicted entries whose uses are remembered, at least


class Hyperbolic(EvictionPolicy):
    """Evicts the entry with the fewest uses for its age: `uses ** power / age`, after hyperbolic caching (Blankstein,
    Sen and Freedman 2017).

    uses:  number of the entry's uses. A use soon after the last one, within as many uses of any entry as there are
           entries, counts for less, since a conversation repeats its passages. The number is remembered when the entry
           is evicted
    age:   uses of any entry since this entry's last use
    power: rises with each use of an entry that LRU would have evicted and falls with each use of an evicted entry that
           LRU would have kept. So the policy follows popularity where passages stay popular, and LRU where they do not

    Entries with nearly the same uses form a group, ordered by age, so that the next victim is the first of a group.
    """

    name: ClassVar[str] = "hyperbolic"

    def __init__(self) -> None:
        self._clock = 0
        self._power = FIRST_POWER
        self._held: dict[str, _Seen] = {}
        self._groups: dict[int, OrderedDict[str, _Seen]] = {}
        self._ghosts: OrderedDict[str, _Seen] = OrderedDict()
        self._recent: OrderedDict[str, int] = OrderedDict()  # keys that LRU would hold, and their bytes
        self._bytes = self._most_bytes = self._recent_bytes = 0

    def insert(self, entry: Entry) -> None:
        seen = self._ghosts.pop(entry.key, None) or _Seen(entry.num_bytes)
        seen.num_bytes = entry.num_bytes
        self._bytes += entry.num_bytes
        self._most_bytes = max(self._most_bytes, self._bytes)
        if entry.key in self._recent:
            self._learn(-STEPS)
        self._use(entry.key, seen)

    def touch(self, key: str) -> None:
        if key in self._held:
            if key not in self._recent:
                self._learn(STEPS)
            self._use(key, self._take(key))

    def remove(self, key: str) -> None:
        if key in self._held:
            self._bytes -= self._take(key).num_bytes
        self._ghosts.pop(key, None)
        self._recent_bytes -= self._recent.pop(key, 0)

    def evict(self, key: str) -> None:
        if key in self._held:
            seen = self._ghosts[key] = self._take(key)
            self._bytes -= seen.num_bytes
            while len(self._ghosts) > max(GHOSTS, len(self._held)):
                self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[str]:
        return (key for _, _, key in heapq.merge(*map(self._ranked, self._groups)))

    def _ranked(self, group: int) -> Iterator[tuple[float, int, str]]:
        """Yield the keys of a group by their worth: the logarithm of `uses ** power / age`."""
        uses = self._power * group / GROUPS
        for key, seen in self._groups[group].items():
            yield uses - math.log2(self._clock - seen.last + 1), seen.last, key

    def _learn(self, steps: float) -> None:
        low, high = POWERS
        self._power = min(high, max(low, self._power + steps / (len(self._held) + 1)))

    def _use(self, key: str, seen: _Seen) -> None:
        self._clock += 1
        seen.uses += min(1.0, (self._clock - seen.last) / (len(self._held) + 1)) if seen.uses else 1.0
        seen.last = self._clock
        self._held[key] = seen
        self._groups.setdefault(seen.group, OrderedDict())[key] = seen
        self._recent_bytes += seen.num_bytes - self._recent.pop(key, 0)
        self._recent[key] = seen.num_bytes
        while self._recent_bytes > self._most_bytes:
            self._recent_bytes -= self._recent.popitem(last=False)[1]

    def _take(self, key: str) -> _Seen:
        seen = self._held.pop(key)
        group = self._groups[seen.group]
        del group[key]
        if not group:
            del self._groups[seen.group]
        return seen
