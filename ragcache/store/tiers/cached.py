"""A durable tier on this machine in front of one that several machines share."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from ragcache.errors import DamagedBlockError, MissingBlockError, StoreError
from ragcache.kv.block import KVBlock
from ragcache.store.complaints import Complaints
from ragcache.store.tiers.base import DurableTier, Tier, TierUsage

log = logging.getLogger(__name__)


class CachedTier(DurableTier):
    """Keeps blocks in `shared`, by whose name it goes, and copies of those written and read here in `local`.

    fills: whether `local` may be written

    The local tier's troubles cost a read of the shared one: they are logged, and a damaged copy is replaced.
    """

    def __init__(self, local: DurableTier, shared: DurableTier, *, fills: bool = True) -> None:
        self.local = local
        self.shared = shared
        self.name = shared.name
        self._fills = fills
        self._complaints = Complaints(log)

    @property
    def caches(self) -> tuple[Tier, ...]:
        return (self.local, *self.shared.caches)

    @property
    def budget_bytes(self) -> int | None:
        return self.shared.budget_bytes

    @property
    def has_been_bounded(self) -> bool:
        return self.shared.has_been_bounded

    def put(self, key: str, block: KVBlock) -> KVBlock | None:
        return self._copy(key, self.shared.put(key, block))

    def put_now(self, key: str, block: KVBlock) -> KVBlock | None:
        return self._copy(key, self.shared.put_now(key, block))

    def put_as_held(self, key: str, block: KVBlock) -> KVBlock | None:
        return self._copy(key, self.shared.put_as_held(key, block))

    def recoded(self, key: str, block: KVBlock) -> KVBlock:
        return self.shared.recoded(key, block)

    def get(self, key: str) -> KVBlock | None:
        try:
            block = self.local.get(key)
        except DamagedBlockError as error:
            log.warning("%s; read again from %s", error, self.name)
            block = None
        return self._copy(key, self.shared.get(key)) if block is None else block

    def verify(self, key: str) -> None:
        """The shared block; a damaged copy here is removed."""
        try:
            self.local.verify(key)
        except MissingBlockError:
            pass
        except DamagedBlockError as error:
            log.warning("%s; removed from %s", error, self.local.name)
            self.local.delete(key)
        self.shared.verify(key)

    def delete(self, key: str) -> None:
        """The copy first: what is left when the shared tier cannot be asked is not served here."""
        self.local.delete(key)
        self.shared.delete(key)

    def __contains__(self, key: object) -> bool:
        return key in self.local or key in self.shared

    def size(self, key: str) -> int | None:
        size = self.local.size(key)
        return self.shared.size(key) if size is None else size

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        wanted = list(keys)
        here = self.local.sizes(wanted)
        return here | self.shared.sizes([key for key in wanted if key not in here])

    def keys(self) -> Iterator[str]:
        """Keys of the shared tier, and of copies here that it has no more."""
        return iter(dict.fromkeys([*self.shared.keys(), *self.local.keys()]))

    def usage(self) -> TierUsage:
        """Usage of the shared tier."""
        return self.shared.usage()

    def prefetch(self, keys: Sequence[str]) -> None:
        self.local.prefetch(keys)
        self.shared.prefetch(keys)

    def sweep(self, older_than_s: float) -> int:
        return self.local.sweep(older_than_s) + self.shared.sweep(older_than_s)

    def used_at(self, key: str) -> float | None:
        return self.shared.used_at(key)

    def mark_used(self, key: str, at: float) -> None:
        self.shared.mark_used(key, at)
        self.local.mark_used(key, at)

    def close(self) -> None:
        self.local.close()
        self.shared.close()

    def _copy(self, key: str, block: KVBlock | None) -> KVBlock | None:
        if block is not None and self._fills:
            try:
                self.local.put_as_held(key, block)
                self._complaints.worked()
            except (StoreError, OSError) as error:
                self._complaints.failed(f"block {key} is not kept on this machine", error)
        return block
