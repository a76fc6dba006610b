"""Keys by a priority that only grows while a key is held."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Held:
    """priority, used: what the order is by; used counts the calls, so that of equals the least recently used is first
    mark: which element of the heap stands for this key"""

    priority: float
    used: int
    mark: int = field(default=0)


class PriorityOrder:
    """A heap whose elements are allowed to be out of date.

    Raising a priority does not move the key: its element stays where it is, as a lower bound, until it comes up, and is
    put in its right place then. So `raise_to` is O(1), the lowest key is found in O(log n) amortised over the calls,
    and the k lowest in O(k log n). A removed key's element is dropped when it comes up, or when such are the majority.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._heap: list[tuple[float, int, int, str]] = []  # priority, used, mark, key
        self._clock = 0

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __getitem__(self, key: str) -> float:
        return self._held[key].priority

    def add(self, key: str, priority: float) -> None:
        """The key is not held at this time."""
        self._clock += 1
        held = self._held[key] = _Held(priority, self._clock, self._clock)
        heapq.heappush(self._heap, (priority, held.used, held.mark, key))

    def raise_to(self, key: str, priority: float) -> None:
        """Count a use of a key that is held. The priority must not be lower than the one it has."""
        self._clock += 1
        held = self._held[key]
        held.priority, held.used = priority, self._clock

    def remove(self, key: str) -> None:
        """An unknown key is ignored."""
        if self._held.pop(key, None) is not None and len(self._heap) > 2 * len(self._held) + 8:
            self._heap = [(held.priority, held.used, held.mark, name) for name, held in self._held.items()]
            heapq.heapify(self._heap)

    def ascending(self) -> Iterator[str]:
        """All keys, lowest first; nothing may be changed while this is iterated."""
        self._settle()
        # Best first over the heap as a tree: nothing is popped. An element that is out of date comes up again, without
        # children, at its true place, which is never before its lower bound.
        front = [(*self._heap[0], 0)] if self._heap else []
        while front:
            _, used, mark, key, index = heapq.heappop(front)
            if index >= 0:
                for child in (2 * index + 1, 2 * index + 2):
                    if child < len(self._heap):
                        heapq.heappush(front, (*self._heap[child], child))
            held = self._held.get(key)
            if held is None or held.mark != mark:
                continue
            if held.used == used:
                yield key
            else:
                heapq.heappush(front, (held.priority, held.used, mark, key, -1))

    def _settle(self) -> None:
        """Bring the true lowest key to the top. Every step of it was paid for by a use or a removal."""
        while self._heap:
            _, used, mark, key = self._heap[0]
            held = self._held.get(key)
            if held is None or held.mark != mark:
                heapq.heappop(self._heap)
            elif held.used != used:
                heapq.heapreplace(self._heap, (held.priority, held.used, mark, key))
            else:
                return
