"""A durable tier on this machine that caches a durable tier shared by several machines."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from ragcache.errors import DamagedBlockError, MissingBlockError, StoreError
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import torch
from ragcache.store.tiers.tier import DurableTier, Room, TierUsage
from ragcache.store.warn_once import WarnOnce

log = logging.getLogger(__name__)


class CachedTier(DurableTier):
    """A durable tier that keeps blocks in `shared`, and copies of the blocks written and read here in `local`. It has
    the shared tier's name.

    fills: whether `local` may be written

    Failures of the local tier only cost a read of the shared tier: they are logged, and a damaged copy is replaced.
    """

    def __init__(self, local: DurableTier, shared: DurableTier, *, fills: bool = True) -> None:
        self.local, self.shared = local, shared
        self.name, self.codec = shared.name, shared.codec
        self._fills = fills
        self._complaints = WarnOnce(log)

    @property
    def caches(self) -> tuple[DurableTier, ...]:
        return (self.local, *self.shared.caches)

    @property
    def evictions(self) -> int:
        return self.shared.evictions

    @property
    def budget_bytes(self) -> int | None:
        return self.shared.budget_bytes

    @property
    def has_been_bounded(self) -> bool:
        return self.shared.has_been_bounded

    def put(self, key: str, block: KVBlock, *, encoded: bool = False) -> KVBlock | None:
        return self._copy(key, self.shared.put(key, block, encoded=encoded))

    def get(self, key: str, room: Room | None = None) -> KVBlock | None:
        try:
            block = self.local.get(key, room)
        except DamagedBlockError as error:
            log.warning("%s; read again from %s", error, self.name)
            block = None
        return self._copy(key, self.shared.get(key)) if block is None else block

    def verify(self, key: str) -> None:
        """Verify the shared block; a damaged local copy is removed."""
        try:
            self.local.verify(key)
        except MissingBlockError:
            pass
        except DamagedBlockError as error:
            log.warning("%s; removed from %s", error, self.local.name)
            self.local.delete(key)
        self.shared.verify(key)

    def delete(self, key: str) -> None:
        """Delete the copy first: if the shared tier does not answer, this machine still stops serving the block."""
        self.local.delete(key)
        self.shared.delete(key)

    def size(self, key: str) -> int | None:
        return self.sizes([key]).get(key)

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        listed = list(keys)
        here = self.local.sizes(listed)
        return here | self.shared.sizes([key for key in listed if key not in here])

    def keys(self) -> Iterator[str]:
        """Return the keys of the shared tier, and of local copies that it no longer has."""
        return iter(dict.fromkeys([*self.shared.keys(), *self.local.keys()]))

    def sweep(self, older_than_s: float) -> int:
        return self.local.sweep(older_than_s) + self.shared.sweep(older_than_s)

    def usage(self) -> TierUsage:
        """Return the shared tier's usage. Copies in the local tier are not counted."""
        return self.shared.usage()

    def used_at(self, key: str) -> float | None:
        return self.shared.used_at(key)

    def mark_used(self, key: str, at: float) -> None:
        self.shared.mark_used(key, at)
        self.local.mark_used(key, at)

    def on_device(self, device: torch.device) -> None:
        self.shared.on_device(device)

    def close(self) -> None:
        self.local.close()
        self.shared.close()

    def _copy(self, key: str, block: KVBlock | None) -> KVBlock | None:
        if block is not None and self._fills:
            try:
                self.local.put(key, block, encoded=True)
                self._complaints.worked()
            except (StoreError, OSError) as error:
                self._complaints.failed(f"block {key} is not kept on this machine", error)
        return block
