"""Which blocks a tier holds, how many bytes they take, and which have to go for a newcomer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ragcache.store.eviction import Entry, EvictionPolicy

if TYPE_CHECKING:
    pass


def never(_key: str) -> bool:
    return False


class Claim(NamedTuple):
    """Room for a newcomer, and what has to go for it."""

    entry: Entry
    victims: list[Entry]

    @property
    def surplus_bytes(self) -> int:
        """Bytes of the victims beyond the newcomer's."""
        return max(0, sum(victim.num_bytes for victim in self.victims) - self.entry.num_bytes)


@dataclass(slots=True)
class _Holding:
    """leases: users that it has now. gone: it was removed, and is counted for its users' sake alone."""

    entry: Entry
    leases: int = 0
    gone: bool = False


@dataclass(eq=False, repr=False)
class ByteLedger:
    """The bytes of one tier under a budget. Not thread-safe, but for what `lease` returns: used under the tier's lock.

    used_bytes counts what is held, what is claimed for newcomers, what is leaving until it has left, and what was
    removed and is in use still. It is at most the budget at every moment.

    _is_pinned: whether a key never has to go
    """

    budget_bytes: int
    _policy: EvictionPolicy
    _is_pinned: Callable[[str], bool] = never
    used_bytes: int = 0
    ghost_bytes: int = 0  # of what was removed and is in use still
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
        """A block was asked for, held or not."""
        self._policy.touch(key)

    def lease(self, key: str) -> Callable[[], None]:
        """Mark a held block as in use; returns what ends that: callable at any time from any thread, once."""
        holding, released = self._held[key], self._released
        holding.leases += 1
        return lambda: released.append(holding)

    def claim(self, entry: Entry) -> Claim | None:
        """Take a newcomer's bytes from the budget; None, with nothing changed, when that cannot be done or the policy
        finds it not worth it.

        The victims are no longer held, but are counted until `settle`. Then comes `add` or `give_back`.
        """
        self.collect()
        victims = self.victims(self.used_bytes + entry.num_bytes - self.budget_bytes)
        if victims is None or not self.admits(entry.key, victims):
            return None
        for victim in victims:
            self.evict(victim.key)
        claim = Claim(entry, victims)
        # Whichever is more: the victims are there until they have left, the newcomer from then on.
        self.used_bytes += entry.num_bytes + claim.surplus_bytes
        return claim

    def settle(self, claim: Claim) -> None:
        """The victims have left."""
        self.used_bytes -= claim.surplus_bytes

    def add(self, entry: Entry) -> None:
        """A newcomer whose bytes were claimed is here; its key is not held at this time."""
        self._held[entry.key] = _Holding(entry)
        self._policy.insert(entry)

    def give_back(self, num_bytes: int) -> None:
        """A newcomer did not come."""
        self.used_bytes -= num_bytes

    def remove(self, key: str) -> Entry | None:
        """Forget a block; it is counted until nobody uses it. None for an unknown one."""
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
        """Blocks that make up at least excess_bytes, none of them in use or pinned; None when there are too few."""
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
        """A victim goes, and is counted no more."""
        self._policy.evict(key)
        self.used_bytes -= self._held.pop(key).entry.num_bytes
        self.evictions += 1

    def collect(self) -> None:
        """Take note of what is not in use any more."""
        while self._released:
            holding = self._released.popleft()
            holding.leases -= 1
            if holding.gone and not holding.leases:
                self.used_bytes -= holding.entry.num_bytes
                self.ghost_bytes -= holding.entry.num_bytes
