"""Blocks by key over a stack of tiers."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ragcache.codecs import get_codec
from ragcache.errors import DamagedBlockError, StoreError, StoreReadOnlyError
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import get_policy
from ragcache.store.key_locks import KeyLocks
from ragcache.store.tiers import DiskTier, MemoryTier, Tier
from ragcache.store.trace import TraceWriter

DEFAULT_MEMORY_BYTES = 2 * 1024**3
LEFTOVER_AGE_S = 3600.0

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A block and the name of the tier that had it."""

    block: KVBlock
    tier: str


@dataclass(frozen=True)
class KVStats:
    """blocks:        in the durable tier
    bytes_by_tier: held now
    hits_by_tier:  blocks served since the store was opened
    misses:        keys asked for that no tier served: it had none, a damaged one, or one that was faster to compute
    damaged:       blocks found damaged and dropped
    evictions:     blocks given up by tiers with a budget
    """

    blocks: int
    bytes_by_tier: dict[str, int]
    hits_by_tier: dict[str, int]
    misses: int
    damaged: int
    evictions: int


class KVStore:
    """Content-addressed KV blocks: host memory over local disk.

    root:         directory of the disk tier, made at the first `put`
    memory_bytes: budget of the memory tier
    codec:        how new blocks are written; blocks of every known codec are read
    eviction:     name of the memory tier's policy
    admission:    "all", or "tinylfu": what the memory tier keeps in place of something else
    trace:        file to which every access is appended (see ragcache/store/trace.py); None records nothing
    read_only:    `put`, `delete` and `sweep` raise StoreReadOnlyError; damaged blocks are not served, but stay on disk

    Safe to call from several threads; several processes may share one root. Every block returned stays valid after it
    is evicted or deleted. Raises ConfigError for an unknown codec or policy, or a key that is no block key;
    TraceError when the trace cannot be written.
    """

    def __init__(
        self,
        root: Path,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        codec: str = "raw",
        eviction: str = "lru",
        admission: str = "all",
        trace: str | Path | None = None,
        read_only: bool = False,
    ) -> None:
        self.root = Path(root)
        self.read_only = read_only
        self._disk = DiskTier(self.root, get_codec(codec))
        # Fastest first. Everything below is written for any number of tiers of which the last is durable.
        self._tiers: tuple[Tier, ...] = (MemoryTier(memory_bytes, get_policy(eviction, admission)), self._disk)
        self._trace = None if trace is None else TraceWriter(Path(trace))
        self._key_locks = KeyLocks()
        self._readers = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="ragcache-read")
        # Apart from the readers: what may be wanted never stands before what is.
        self._prefetchers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ragcache-prefetch")
        self._hits: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    def put(self, key: str, block: KVBlock) -> KVBlock:
        """Hold a block in every tier, the durable one first: on return it is flushed to the device.

        Faster tiers hold what the durable one will give back, so that a block is the same from every tier (law 6); it
        is returned, so that a block's first use can be like all later ones.
        Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError; then no tier holds anything new.
        """
        self._refuse_if_read_only()
        with self._key_locks.hold(key):
            written = self._disk.put(key, block)
            self._promote(key, written, len(self._tiers) - 1)
        self._record_made(key, written)
        return written

    def remember(self, key: str, block: KVBlock) -> KVBlock:
        """Hold a block in this process alone: for a store that cannot be written, or is full.

        It is held, and returned, as the durable tier would have given it back. Raises UnencodableBlockError.
        """
        recoded = self._disk.recoded(key, block)
        with self._key_locks.hold(key):
            self._promote(key, recoded, len(self._tiers) - 1)
        self._record_made(key, recoded)
        return recoded

    def pass_on(self, key: str, block: KVBlock, *, hold: bool = True) -> KVBlock:
        """The block as the durable tier, which has it already, would give it back: for who computed it all the same.

        hold: keep it in the faster tiers, unless it was deleted meanwhile; waits for other work on the key
        Raises UnencodableBlockError.
        """
        recoded = self._disk.recoded(key, block)
        if hold:
            with self._key_locks.hold(key):
                if key in self._tiers[-1]:
                    recoded = self._promote(key, recoded, len(self._tiers) - 1)
        self._record_made(key, recoded)
        return recoded

    @property
    def durable_tier(self) -> str:
        """The name of the tier that keeps every block; what is in a faster one need not be waited for."""
        return self._tiers[-1].name

    def get(self, key: str) -> Loaded | None:
        """The block from the fastest tier that has it, kept in the faster ones from now on; None when no tier has it.

        A damaged block is logged, counted, dropped and not served: None. Raises SchemaVersionError when a newer
        version wrote the block: it stays.
        """
        loaded = self.fetch(key)
        self._record([key], [loaded])
        return loaded

    def fetch(self, key: str) -> Loaded | None:
        """`get` that is no access yet: for who may not need the block in the end. What is used goes to `serve`."""
        self._disk.path(key)
        return self._get(key)

    def ask(self, keys: Sequence[str]) -> str:
        """Say that one request wants these; what became of each, `serve` is told. Returns the request's name."""
        return "" if self._trace is None else self._trace.asked(keys, [None] * len(keys))

    def serve(self, request: str, key: str, loaded: Loaded | None) -> None:
        """Count and trace an access that `ask` announced. None: no tier served it; it is traced when it is made."""
        self._count(loaded)
        if self._trace is not None and loaded is not None:
            self._trace.served(request, key, (loaded.block.num_bytes, loaded.block.num_tokens, loaded.tier))

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Say that `fetch` is going to be called for these at once; the device then sees all of them."""
        self._disk.prefetch([key for key in dict.fromkeys(keys) if key not in self._tiers[0]])

    def get_many(self, keys: Sequence[str]) -> list[Loaded | None]:
        """`get` for several keys, in their order; files are read ahead together and verified on several threads."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._tiers[0]]
        self._disk.prefetch(wanted)
        found = [self._get(key) for key in keys] if len(wanted) <= 1 else list(self._readers.map(self._get, keys))
        self._record(keys, found)
        return found

    def locate(self, key: str) -> str | None:
        """The name of the fastest tier that has the block. Changes nothing and verifies nothing."""
        return next((tier.name for tier in self._tiers if key in tier), None)

    def size(self, key: str) -> int | None:
        """Bytes that a read from the fastest tier that has the block moves, or None. Changes and reads nothing."""
        return next((size for tier in self._tiers if (size := tier.size(key)) is not None), None)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Say that these blocks are wanted soon; returns at once. They are brought into the fastest tier in the
        background, as far as its budget and policy take them. No access is counted, and nothing is raised for a block
        that cannot be served: whoever asks for it is told."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._tiers[0]]
        self._disk.prefetch(wanted)
        for key in wanted:
            self._prefetchers.submit(self._bring, key)

    def __contains__(self, key: object) -> bool:
        return any(key in tier for tier in self._tiers)

    def delete(self, key: str) -> None:
        """Remove a block from every tier (law 10); an absent one is fine. Raises StoreReadOnlyError."""
        self._refuse_if_read_only()
        with self._key_locks.hold(key):
            for tier in self._tiers:
                tier.delete(key)

    def keys(self) -> Iterator[str]:
        """Keys of the durable tier. What no chunk refers to is an orphan: `doctor` collects it."""
        return self._disk.keys()

    def verify(self, key: str) -> None:
        """Read a block from the durable tier and serve it to nobody.

        Raises MissingBlockError, DamagedBlockError, SchemaVersionError.
        """
        self._disk.verify(key)

    def refresh(self) -> int:
        """Let go of blocks that are not in the durable tier (any more); returns how many.

        To be called when the document store's generation has moved on: what another process deleted is in this one's
        memory still. Blocks that were only remembered go too.
        """
        held = [(tier, key) for tier in self._tiers[:-1] for key in list(tier.keys())]
        gone = [(tier, key) for tier, key in held if key not in self._tiers[-1]]
        for tier, key in gone:
            tier.delete(key)
        return len(gone)

    def sweep(self, older_than_s: float = LEFTOVER_AGE_S) -> int:
        """Remove temporary files of killed writers; returns how many. Nothing reads them, they only take up space."""
        self._refuse_if_read_only()
        return self._disk.sweep(older_than_s)

    def stats(self) -> KVStats:
        """Walks the durable tier's directories: for people and monitoring, not for every question."""
        usage = {tier.name: tier.usage() for tier in self._tiers}
        with self._counting:
            return KVStats(
                blocks=usage[self._tiers[-1].name].blocks,
                bytes_by_tier={name: use.num_bytes for name, use in usage.items()},
                hits_by_tier={name: self._hits[name] for name in usage},
                misses=self._counts["misses"],
                damaged=self._counts["damaged"],
                evictions=sum(tier.evictions for tier in self._tiers),
            )

    def close(self) -> None:
        """Let go of memory and threads. Blocks that were returned stay valid. A second call is fine."""
        self._prefetchers.shutdown(cancel_futures=True)
        self._readers.shutdown()
        for tier in self._tiers:
            tier.close()
        if self._trace is not None:
            self._trace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _get(self, key: str) -> Loaded | None:
        with self._key_locks.hold(key):
            return self._load(key)

    def _record(self, keys: Sequence[str], found: Sequence[Loaded | None]) -> None:
        for loaded in found:
            self._count(loaded)
        if self._trace is not None:
            sizes = [None if one is None else (one.block.num_bytes, one.block.num_tokens, one.tier) for one in found]
            self._trace.asked(keys, sizes)

    def _bring(self, key: str) -> None:
        try:
            with self._key_locks.hold(key):
                if key not in self._tiers[0]:
                    self._load(key)
        except (StoreError, OSError) as error:
            log.debug("%s: not fetched ahead: %s", key, error)

    def _record_made(self, key: str, block: KVBlock) -> None:
        if self._trace is not None:
            self._trace.made(key, block.num_bytes, block.num_tokens)

    def _load(self, key: str) -> Loaded | None:
        for level, tier in enumerate(self._tiers):
            try:
                block = tier.get(key)
            except DamagedBlockError as error:
                self._drop(key, tier, error)
                continue
            if block is not None:
                return Loaded(self._promote(key, block, level), tier.name)
        return None

    def _promote(self, key: str, block: KVBlock, level: int) -> KVBlock:
        """Hold a block in all tiers faster than `level`; returns the copy of the fastest that keeps it."""
        for tier in reversed(self._tiers[:level]):
            block = tier.put(key, block) or block
        return block

    def _drop(self, key: str, tier: Tier, error: DamagedBlockError) -> None:
        log.warning("%s; dropped from %s", error, tier.name)
        with self._counting:
            self._counts["damaged"] += 1
        if self.read_only:
            return
        try:
            tier.delete(key)
        except (StoreError, OSError) as problem:  # it is not served, whether or not it can be removed
            log.warning("%s: the damaged block cannot be removed: %s", key, problem)

    def _count(self, loaded: Loaded | None) -> None:
        with self._counting:
            if loaded is None:
                self._counts["misses"] += 1
            else:
                self._hits[loaded.tier] += 1

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise StoreReadOnlyError(f"{self.root}: opened read-only; open it for writing to change it")
