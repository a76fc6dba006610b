"""Blocks by key over a stack of tiers."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from ragcache.codecs import get_codec
from ragcache.errors import DamagedBlockError, MissingBlockError, PinError, StoreError, StoreReadOnlyError
from ragcache.kv.block import KVBlock
from ragcache.openmp import work_alone
from ragcache.store.complaints import Complaints
from ragcache.store.demotion import Demotion
from ragcache.store.eviction import EvictionPolicy, get_policy
from ragcache.store.expiry import Expiry
from ragcache.store.key_locks import KeyLocks
from ragcache.store.pins import Pins
from ragcache.store.tiers import BudgetedTier, DeviceTier, DiskTier, MemoryTier, Tier
from ragcache.store.trace import TraceWriter
from ragcache.store.write_behind import WriteBehind

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
    unwritten_bytes: of blocks that wait to be written to disk, or are in use since they waited
    pinned:        keys that no tier gives up
    """

    blocks: int
    bytes_by_tier: dict[str, int]
    hits_by_tier: dict[str, int]
    misses: int
    damaged: int
    evictions: int
    unwritten_bytes: int = 0
    pinned: int = 0


class KVStore:
    """Content-addressed KV blocks: the model's device over host memory over local disk.

    root:         directory of the disk tier, made at the first `put`
    memory_bytes: budget of the memory tier
    device_bytes: budget of the device tier, which is there from `use_device` on; 0: no such tier
    disk_bytes:   budget of the disk tier; None keeps every block
    write_behind_bytes: of blocks that `put` leaves to a thread to write; 0: `put` writes
    ttl_s:        seconds after which a block that was not used is dropped; None keeps it
    codec:        how new blocks are written; blocks of every known codec are read
    eviction:     name of the tiers' policy
    admission:    "all", or "tinylfu": what a full tier keeps in place of something else
    trace:        file to which every access is appended (see ragcache/store/trace.py); None records nothing
    read_only:    `put`, `delete` and `sweep` raise StoreReadOnlyError; damaged blocks are not served, but stay on disk
    referenced:   which of some keys chunks refer to. Then a block that another process deleted is not written again by
                  this one, and one that only this process holds outlives `refresh`

    What a tier evicts goes to the next slower one, if it is not there. A block is in use until its tensors are gone; no
    tier evicts it before, and its bytes stay counted when it is deleted.

    Safe to call from several threads; several processes may share one root. Every block returned stays valid after it
    is evicted or deleted. Raises ConfigError for an unknown codec or policy, a budget below 0, or a key that is no
    block key; TraceError when the trace cannot be written.
    """

    def __init__(
        self,
        root: Path,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        device_bytes: int = 0,
        disk_bytes: int | None = None,
        write_behind_bytes: int = 0,
        ttl_s: float | None = None,
        codec: str = "raw",
        eviction: str = "lru",
        admission: str = "all",
        trace: str | Path | None = None,
        read_only: bool = False,
        referenced: Callable[[Iterable[str]], set[str]] | None = None,
    ) -> None:
        self.root = Path(root)
        self.read_only = read_only
        self._new_policy: Callable[[], EvictionPolicy] = lambda: get_policy(eviction, admission)
        self._pins = Pins(self.root)
        self._device_bytes = device_bytes
        memory = MemoryTier(memory_bytes, self._new_policy(), is_pinned=self._pins.__contains__)
        memory.demote = lambda key, block: self._demotion.demote(memory, self._below(memory), key, block)
        budget = None if read_only else disk_bytes
        self._disk = DiskTier(self.root, get_codec(codec), budget, self._new_policy(), self._pins.__contains__)
        behind = WriteBehind(self._disk, write_behind_bytes)
        self._durable: DiskTier | WriteBehind = behind if write_behind_bytes else self._disk
        # Fastest first. Everything below is written for any number of tiers of which the last is durable.
        self._volatile: tuple[BudgetedTier, ...] = (memory,)
        self._expiry = None if ttl_s is None else Expiry(ttl_s, self._disk.files, writable=not read_only)
        self._complaints = Complaints(log)
        self._trace = None if trace is None else TraceWriter(Path(trace))
        self._key_locks = KeyLocks()
        self._demotion = Demotion(self._durable, self._key_locks, read_only=read_only, referenced=referenced)
        helpers = partial(ThreadPoolExecutor, initializer=work_alone)
        self._readers = helpers(min(8, os.cpu_count() or 1), thread_name_prefix="ragcache-read")
        # Apart from the readers: what may be wanted never stands before what is.
        self._prefetchers = helpers(2, thread_name_prefix="ragcache-prefetch")
        self._hits: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    @property
    def _tiers(self) -> tuple[Tier, ...]:
        return (*self._volatile, self._durable)

    def _below(self, tier: BudgetedTier) -> Tier:
        return self._tiers[self._volatile.index(tier) + 1]

    def use_device(self, device: torch.device) -> None:
        """Say where the model is, once it is loaded: from now on there is a device tier, if it has a budget, and on
        CUDA host memory is page-locked. A second call changes nothing."""
        if device.type == "cuda":
            for tier in self._volatile:
                if isinstance(tier, MemoryTier):
                    tier.page_locked = True
        if self._device_bytes and not any(isinstance(tier, DeviceTier) for tier in self._volatile):
            tier = DeviceTier(device, self._device_bytes, self._new_policy(), is_pinned=self._pins.__contains__)
            tier.demote = lambda key, block: self._demotion.demote(tier, self._below(tier), key, block)
            self._volatile = (tier, *self._volatile)

    def put(self, key: str, block: KVBlock, *, flushed: bool = False) -> KVBlock:
        """Hold a block in every tier, the durable one first: on return it is flushed to the device, unless it is
        written behind. A block for which the disk budget has no room is held by the faster tiers alone.

        flushed: write it before returning in any case

        Faster tiers hold what the durable one will give back, so that a block is the same from every tier (law 6); it
        is returned, so that a block's first use can be like all later ones.
        Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError; then no tier holds anything new.
        """
        self._refuse_if_read_only()
        with self._key_locks.hold(key):
            written = self._durable.put_now(key, block) if flushed else self._durable.put(key, block)
            self._demotion.stays(key, late=self._durable is not self._disk)
            kept = self._promote(key, written or self._disk.recoded(key, block), len(self._volatile))
            self._mark_used(key)
        self._record_made(key, kept)
        return kept

    def remember(self, key: str, block: KVBlock) -> KVBlock:
        """Hold a block in this process alone: for a store that cannot be written, or is full.

        It is held, and returned, as the durable tier would have given it back. Raises UnencodableBlockError.
        """
        recoded = self._disk.recoded(key, block)
        with self._key_locks.hold(key):
            if key not in self._durable:
                self._demotion.passes(key)
            self._promote(key, recoded, len(self._volatile))
            self._mark_used(key)
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
                if key in self._durable:
                    recoded = self._promote(key, recoded, len(self._volatile))
        self._record_made(key, recoded)
        return recoded

    @property
    def durable_tier(self) -> str:
        """The name of the tier that keeps every block; what is in a faster one need not be waited for."""
        return self._durable.name

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
        self._durable.prefetch(self._not_in_memory(keys))

    def get_many(self, keys: Sequence[str]) -> list[Loaded | None]:
        """`get` for several keys, in their order; files are read ahead together and verified on several threads."""
        wanted = self._not_in_memory(keys)
        self._durable.prefetch(wanted)
        found = [self._get(key) for key in keys] if len(wanted) <= 1 else list(self._readers.map(self._get, keys))
        self._record(keys, found)
        return found

    def locate(self, key: str) -> str | None:
        """The name of the fastest tier that has the block. Changes nothing and verifies nothing."""
        return None if self._is_over(key) else next((tier.name for tier in self._tiers if key in tier), None)

    def size(self, key: str) -> int | None:
        """Bytes that a read from the fastest tier that has the block moves, or None. Changes and reads nothing."""
        if self._is_over(key):
            return None
        return next((size for tier in self._tiers if (size := tier.size(key)) is not None), None)

    def stored_bytes(self, key: str) -> int:
        """Bytes that the durable tier holds of the block; 0 where it has none. Changes and reads nothing."""
        return self._durable.size(key) or 0

    def prefetch(self, keys: Sequence[str]) -> None:
        """Say that these blocks are wanted soon; returns at once. They are brought into the fastest tier in the
        background, as far as its budget and policy take them. No access is counted, and nothing is raised for a block
        that cannot be served: whoever asks for it is told."""
        self._durable.prefetch(self._not_in_memory(keys))
        for key in dict.fromkeys(keys) if any(tier.budget_bytes for tier in self._volatile) else ():
            if key not in self._volatile[0]:
                self._prefetchers.submit(self._bring, key)

    def __contains__(self, key: object) -> bool:
        return any(key in tier for tier in self._tiers) and not self._is_over(str(key))

    def pin(self, keys: Iterable[str]) -> None:
        """Let no tier give up these blocks, nor time drop them, until `unpin` or `delete`; also after reopening.

        Other processes heed it from their next `refresh` on. Raises MissingBlockError for a block that no tier has,
        PinError when a budget would have no room left beside the pinned blocks, StoreReadOnlyError; then nothing is
        pinned that was not.
        """
        self._refuse_if_read_only()
        self._pins.add(keys, self._refuse_too_many_pins)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let blocks go again. Those that are not pinned are ignored. Raises StoreReadOnlyError."""
        self._refuse_if_read_only()
        self._pins.remove(keys)

    @property
    def pinned(self) -> frozenset[str]:
        return self._pins.keys

    @property
    def gives_up(self) -> bool:
        """Whether a block can be gone that nobody deleted: there is, or was, a disk budget, or a time to live."""
        return self._expiry is not None or self._disk.has_been_bounded

    def flush(self, keys: Iterable[str] | None = None) -> None:
        """Wait until these blocks (None: all) are flushed to disk. Raises the first error that kept one from it."""
        if isinstance(self._durable, WriteBehind):
            self._durable.flush(keys)

    def delete(self, key: str) -> None:
        """Remove a block from every tier (law 10); an absent one is fine. Raises StoreReadOnlyError."""
        self._refuse_if_read_only()
        with self._key_locks.hold(key):
            for tier in self._tiers:
                tier.delete(key)
            self._demotion.stays(key)
            self._forget_use(key)
        self._pins.remove([key])

    def keys(self) -> Iterator[str]:
        """Keys of the durable tier. What no chunk refers to is an orphan: `doctor` collects it."""
        return self._durable.keys()

    def verify(self, key: str) -> None:
        """Read a block from the durable tier and serve it to nobody.

        Raises MissingBlockError, DamagedBlockError, SchemaVersionError.
        """
        self._durable.verify(key)

    def refresh(self) -> int:
        """Let go of blocks that are not in the durable tier (any more); returns how many.

        To be called when the document store's generation has moved on: what another process deleted is in this one's
        memory still. Blocks that were only remembered go too. What the disk's budget gave up stays while a chunk refers
        to it. A block that was written late, after its document was deleted, is deleted as well.
        """
        self._pins.reload()
        self._demotion.delete_late()
        held = [(tier, key) for tier in self._volatile for key in list(tier.keys()) if key not in self._durable]
        kept = self._demotion.wanted(key for _, key in held)
        gone = [(tier, key) for tier, key in held if key not in kept]
        for tier, key in gone:
            tier.delete(key)
            self._demotion.stays(key)
        return len(gone)

    def expire(self) -> list[str]:
        """Drop the blocks whose time to live is over from every tier; returns their keys."""
        self._refuse_if_read_only()
        if self._expiry is None:
            return []
        over = [key for tier in self._tiers for key in list(tier.keys()) if self._is_over(key)]
        for key in dict.fromkeys(over):
            with self._key_locks.hold(key):
                self._drop_if_over(key)
        return list(dict.fromkeys(over))

    def sweep(self, older_than_s: float = LEFTOVER_AGE_S) -> int:
        """Remove temporary files of killed writers; returns how many. Nothing reads them, they only take up space.

        Blocks whose time to live is over go, too.
        """
        self.expire()
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
                unwritten_bytes=self._durable.unwritten_bytes if isinstance(self._durable, WriteBehind) else 0,
                pinned=len(self._pins),
            )

    def close(self) -> None:
        """Write what waits to be written, and let go of memory and threads. Blocks that were returned stay valid. A
        second call is fine."""
        self._prefetchers.shutdown(cancel_futures=True)
        self._readers.shutdown()
        for tier in self._tiers:
            tier.close()
        self._demotion.delete_late()
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
            if self._drop_if_over(key):
                return None
            loaded = self._load(key)
            if loaded is not None:
                self._mark_used(key)
            return loaded

    def _record(self, keys: Sequence[str], found: Sequence[Loaded | None]) -> None:
        for loaded in found:
            self._count(loaded)
        if self._trace is not None:
            sizes = [None if one is None else (one.block.num_bytes, one.block.num_tokens, one.tier) for one in found]
            self._trace.asked(keys, sizes)

    def _bring(self, key: str) -> None:
        try:
            with self._key_locks.hold(key):
                if key not in self._volatile[0] and not self._is_over(key):
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

    def _not_in_memory(self, keys: Sequence[str]) -> list[str]:
        return [key for key in dict.fromkeys(keys) if not any(key in tier for tier in self._volatile)]

    # Time to live

    def _is_over(self, key: str) -> bool:
        return self._expiry is not None and key not in self._pins and self._expiry.is_over(key)

    def _drop_if_over(self, key: str) -> bool:
        """Drop a block whose time is over. Whether it can be removed or not, it is not served."""
        over = self._is_over(key)
        for tier in self._tiers[: -1 if self.read_only else None] if over else ():
            try:
                tier.delete(key)
            except (StoreError, OSError) as error:
                self._complaints.failed(f"block {key} cannot be removed", error)
        if over and not self.read_only:
            self._forget_use(key)
        return over

    def _mark_used(self, key: str) -> None:
        if self._expiry is not None:
            self._expiry.use(key)

    def _forget_use(self, key: str) -> None:
        if self._expiry is not None:
            self._expiry.forget(key)

    def _refuse_too_many_pins(self, pinned: frozenset[str]) -> None:
        """Beside the pinned blocks every tier has to have room for one more of their size."""
        missing = [key for key in pinned if key not in self._pins and self.size(key) is None]
        if missing:
            raise MissingBlockError(f"no tier has the block {missing[0]}; it has to be computed before it is pinned")
        held = [self.size(key) or 0 for key in pinned]
        on_disk = [self._disk.size(key) or 0 for key in pinned]
        budgets = [(tier.name, tier.budget_bytes, held) for tier in self._volatile]
        for name, budget, sizes in [*budgets, ("disk", self._disk.budget_bytes, on_disk)]:
            if budget and budget < sum(sizes) + max(sizes, default=0):
                raise PinError(
                    f"{len(pinned)} pinned blocks of {sum(sizes):,} bytes would fill the {name} tier of {budget:,} "
                    "bytes; pin fewer, or give the tier more"
                )

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
