"""Accounting of a tier's blocks: which it holds, how many bytes they take, and which to evict for a new block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ragcache.store.eviction import Entry, EvictionPolicy


def never(_key: str) -> bool:
    return False


class Reservation(NamedTuple):
    """Bytes reserved for a new block, and the blocks to evict for it."""

    entry: Entry
    victims: list[Entry]

    @property
    def surplus_bytes(self) -> int:
        """Return the victims' bytes beyond those of the new block."""
        return max(0, sum(victim.num_bytes for victim in self.victims) - self.entry.num_bytes)


@dataclass(slots=True)
class _Holding:
    """A block in the ledger. leases: its current users. gone: it was removed, and only counts because it is in use."""

    entry: Entry
    leases: int = 0
    gone: bool = False


@dataclass(eq=False, repr=False)
class ByteLedger:
    """The bytes of one tier under a budget. Used under the tier's lock: not thread-safe, except for the functions that
    `lease` returns.

    used_bytes counts the blocks held, bytes reserved for new blocks, victims until they are freed, and removed blocks
    that are still in use. It is at most the budget at every moment.

    _is_pinned: whether a key is never evicted
    """

    budget_bytes: int
    _policy: EvictionPolicy
    _is_pinned: Callable[[str], bool] = never
    used_bytes: int = 0
    ghost_bytes: int = 0  # of removed blocks that are still in use
    evictions: int = 0
    _held: dict[str, _Holding] = field(default_factory=dict)
    _released: deque[_Holding] = field(default_factory=deque)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> Iterator[str]:
        return iter(list(self._held))

    def touch(self, key: str) -> None:
        """Record an access to a block, held or not."""
        self._policy.touch(key)

    def lease(self, key: str) -> Callable[[], None]:
        """Mark a held block as in use. Return the function that ends the use: call it once, at any time, from any
        thread."""
        holding, released = self._held[key], self._released
        holding.leases += 1
        return lambda: released.append(holding)

    def reserve(self, entry: Entry) -> Reservation | None:
        """Reserve a new block's bytes. Return None and change nothing if they cannot be freed or the policy refuses.

        The victims are no longer held, but count until `settle`. Then call `add` or `release`.
        """
        self.collect()
        victims = self.victims(self.used_bytes + entry.num_bytes - self.budget_bytes)
        if victims is None or not self.admits(entry.key, victims):
            return None
        for victim in victims:
            self.evict(victim.key)
        reservation = Reservation(entry, victims)
        # Count the larger: the victims until they are freed, or the new block from then on.
        self.used_bytes += entry.num_bytes + reservation.surplus_bytes
        return reservation

    def settle(self, reservation: Reservation) -> None:
        """Record that the victims' memory is freed."""
        self.used_bytes -= reservation.surplus_bytes

    def add(self, entry: Entry) -> None:
        """Hold a new block whose bytes were reserved; its key is not held at this time."""
        self._held[entry.key] = _Holding(entry)
        self._policy.insert(entry)

    def release(self, num_bytes: int) -> None:
        """Return the reserved bytes of a block that was not stored."""
        self.used_bytes -= num_bytes

    def remove(self, key: str) -> Entry | None:
        """Remove a block and return its entry, or None if it is unknown. Its bytes count until its last use ends."""
        self.collect()
        holding = self._held.pop(key, None)
        if holding is None:
            return None
        self._policy.remove(key)
        if holding.leases:
            holding.gone = True
            self.ghost_bytes += holding.entry.num_bytes
        else:
            self.used_bytes -= holding.entry.num_bytes
        return holding.entry

    def victims(self, excess_bytes: int) -> list[Entry] | None:
        """Return blocks of at least excess_bytes together, none in use or pinned; None if there are too few."""
        victims: list[Entry] = []
        for key in self._policy.victims() if excess_bytes > 0 else ():
            holding = self._held[key]
            if holding.leases or self._is_pinned(key):
                continue
            victims.append(holding.entry)
            excess_bytes -= holding.entry.num_bytes
            if excess_bytes <= 0:
                break
        return victims if excess_bytes <= 0 else None

    def admits(self, key: str, victims: list[Entry]) -> bool:
        return self._policy.admits(key, [victim.key for victim in victims])

    def evict(self, key: str) -> None:
        """Remove a victim from the ledger and from used_bytes."""
        self._policy.evict(key)
        self.used_bytes -= self._held.pop(key).entry.num_bytes
        self.evictions += 1

    def collect(self) -> None:
        """Account for the leases that ended since the last call."""
        while self._released:
            holding = self._released.popleft()
            holding.leases -= 1
            if holding.gone and not holding.leases:
                self.used_bytes -= holding.entry.num_bytes
                self.ghost_bytes -= holding.entry.num_bytes
