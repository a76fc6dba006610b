"""A stack of tiers, searched from the fastest to the slowest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ragcache.errors import DamagedBlockError, PinError
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import torch
from ragcache.store.counters import Loaded
from ragcache.store.tiers import BudgetedTier, DurableTier, MemoryTier, Tier
from ragcache.store.tiers.demotion import Demotion


class Stored(NamedTuple):
    """The fastest tier that has a block, and the bytes that reading the block moves."""

    tier: str
    num_bytes: int


@dataclass(eq=False, repr=False)
class TierStack:
    """Any number of tiers in memory, fastest first, over a durable tier and its caches. A block is read from the
    fastest tier that has it, and the faster tiers keep it from then on. `demotion` hands evicted blocks to the next
    slower tier.

    As thread-safe as its tiers. Two concurrent calls for one key may leave a block in some tiers and delete it from
    others: the caller locks the key.
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
        """Add a tier on top, as the fastest."""
        below = self.volatile[0] if self.volatile else self.durable
        tier.demote = lambda key, block: self.demotion.demote(tier, below, key, block)
        self.volatile = (tier, *self.volatile)

    def on_device(self, device: torch.device) -> None:
        """Prepare every tier for the model's device."""
        for tier in self:
            tier.on_device(device)

    def load(self, key: str, damaged: Callable[[str, Tier, DamagedBlockError], None]) -> Loaded | None:
        """Return the block from the fastest tier that can serve it, and keep it in the faster tiers; None if no tier
        can.

        damaged: called for each tier whose block is damaged, before the next tier is tried
        """
        last = len(self.volatile) - 1
        for level, tier in enumerate(self):
            try:
                block = self.memory.read(key, tier) if isinstance(tier, DurableTier) else tier.get(key)
            except DamagedBlockError as error:
                damaged(key, tier, error)
                continue
            if block is not None:
                return Loaded(self.promote(key, block, min(level, last)), tier.name)
        return None

    def promote(self, key: str, block: KVBlock, level: int | None = None) -> KVBlock:
        """Put a block, as the durable tier would return it, into the `level` fastest tiers in memory, None: all.

        Returns the fastest copy that was kept.
        """
        for tier in reversed(self.volatile[:level]):
            block = tier.put(key, block) or block
        return block

    def lookup(self, keys: Iterable[str], *, memory_only: bool = False) -> dict[str, Stored]:
        """Return the fastest tier of each of these blocks and its size there. Absent blocks are left out. Verify
        nothing.

        memory_only: access no disk and no network
        """
        unique_keys, found = list(dict.fromkeys(keys)), dict[str, Stored]()
        for tier in self.volatile if memory_only else (*self.volatile, *self.durable.caches):
            rest = [key for key in unique_keys if key not in found]
            found |= {key: Stored(tier.name, size) for key in rest if (size := tier.size(key)) is not None}
        rest = [] if memory_only else [key for key in unique_keys if key not in found]
        kept = self.durable.sizes(rest) if rest else {}
        return found | {key: Stored(self.durable.name, size) for key, size in kept.items()}

    def drop_unwanted(self, *, copies: bool) -> int:
        """Delete the blocks that no chunk refers to from the caches on this machine's disk, and from memory those that
        the durable tier does not have either. Return how many blocks left memory.

        copies: whether the caches on disk may be changed
        """
        caches = self.durable.caches if copies and self.demotion.referenced is not None else ()
        here = [(tier, key) for tier in caches for key in list(tier.keys())]
        held = [(tier, key) for tier in self.volatile for key in list(tier.keys())]
        demoted = self.demotion.wanted(key for _, key in (*here, *held))
        for cache, key in here:
            if key not in demoted:
                cache.delete(key)
        gone = [(tier, key) for tier, key in held if key not in demoted and key not in self.durable]
        for tier, key in gone:
            tier.delete(key)
            self.demotion.stays(key)
        return len(gone)

    def refuse_too_many(self, pinned: frozenset[str]) -> None:
        """Raise PinError unless every tier has room for the pinned blocks and another block as large as the largest of
        them."""
        held = [stored.num_bytes for stored in self.lookup(pinned).values()]
        kept = list(self.durable.sizes(pinned).values())
        for tier in self:
            budget, sizes = tier.budget_bytes, kept if tier is self.durable else held
            if budget and budget < sum(sizes) + max(sizes, default=0):
                raise PinError(
                    f"{len(pinned)} pinned blocks of {sum(sizes):,} bytes would fill the {tier.name} tier of "
                    f"{budget:,} bytes; pin fewer, or give the tier more"
                )
