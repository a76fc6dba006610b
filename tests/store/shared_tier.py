"""A durable tier that is no directory: a test double of a service that several processes share."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from ragcache.codecs import Codec
from ragcache.errors import ConfigError, MissingBlockError
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import EvictionPolicy
from ragcache.store.tiers import DurableTier, Room, TierUsage


class Kept(NamedTuple):
    block: KVBlock
    used_at: float


class SharedTier(DurableTier):
    """Blocks in a dictionary, by the name of the store: what one instance puts, all others of that name have."""

    name = "shared"
    services: ClassVar[dict[Path, dict[str, Kept]]] = {}

    def __init__(
        self,
        root: Path,
        codec: Codec,
        budget_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        is_pinned: Callable[[str], bool] = bool,
    ) -> None:
        self._kept = self.services.setdefault(root, {})
        self.codec = codec
        self._lock = threading.Lock()

    @property
    def budget_bytes(self) -> int | None:
        return None

    @property
    def has_been_bounded(self) -> bool:
        return False

    def put(self, key: str, block: KVBlock, *, encoded: bool = False, flushed: bool = False) -> KVBlock:
        _checked(key)
        block = block if encoded else self.codec.decode(self.codec.encode(block))
        held = block.map(lambda tensor: tensor.detach().clone())
        self._kept[key] = Kept(held, time.time())
        return held

    def get(self, key: str, room: Room | None = None) -> KVBlock | None:
        kept = self._kept.get(_checked(key))
        return None if kept is None else kept.block

    def verify(self, key: str) -> None:
        if self.get(key) is None:
            raise MissingBlockError(f"no block {key}")

    def delete(self, key: str) -> None:
        self._kept.pop(_checked(key), None)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and _checked(key) in self._kept

    def size(self, key: str) -> int | None:
        kept = self._kept.get(_checked(key))
        return None if kept is None else kept.block.num_bytes

    def keys(self) -> Iterator[str]:
        return iter(list(self._kept))

    def usage(self) -> TierUsage:
        sizes = [kept.block.num_bytes for kept in list(self._kept.values())]
        return TierUsage(len(sizes), sum(sizes))

    def sweep(self, older_than_s: float) -> int:
        return 0

    def used_at(self, key: str) -> float | None:
        kept = self._kept.get(_checked(key))
        return None if kept is None else kept.used_at

    def mark_used(self, key: str, at: float) -> None:
        with self._lock:
            if key in self._kept:
                self._kept[key] = Kept(self._kept[key].block, at)


def _checked(key: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise ConfigError(f"{key!r} is no block key")
    return key
