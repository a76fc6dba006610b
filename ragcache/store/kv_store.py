"""Blocks by key over a stack of tiers, of which the last is durable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, Self

from ragcache.codecs import Bases, Codec, get_codec
from ragcache.codecs.basis import basis_name
from ragcache.errors import BasisError, DamagedBlockError, MissingBlockError, StoreError, StoreReadOnlyError
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import torch
from ragcache.store.counters import AccessCounts, KVStats, Loaded
from ragcache.store.documents import DocumentStore
from ragcache.store.eviction import EvictionPolicy, get_policy
from ragcache.store.foreign import ForeignUsage, Listed, PassageList
from ragcache.store.pins import Pins
from ragcache.store.remote import Connection
from ragcache.store.retention import Expiry
from ragcache.store.tiers import CachedTier, DeviceTier, MemoryTier, RemoteTier, Tier, get_durable
from ragcache.store.tiers.demotion import Demotion
from ragcache.store.tiers.key_locks import KeyLocks
from ragcache.store.tiers.stack import Stored, TierStack
from ragcache.store.trace import TraceWriter
from ragcache.store.warn_once import WarnOnce

Where = Literal["durable", "memory", "again", "nowhere"]
DEFAULT_MEMORY_BYTES = 2 * 1024**3
LEFTOVER_AGE_S = 3600.0

log = logging.getLogger(__name__)


class KVStore:
    """Content-addressed KV blocks: the model's device over host memory over a durable tier.

    root:         directory of the pins and of what the durable tier has on this machine, made at the first `put`
    memory_bytes: budget of the memory tier
    device_bytes: budget of the device tier, which is there from `use_device` on; 0: no such tier
    disk_bytes:   budget of the durable tier; None keeps every block
    durable:      name of the durable tier on this machine
    remote:       where blocks are kept beyond this machine; what is on this machine are then copies, within disk_bytes
    ttl_s:        seconds after which a block that was not used is dropped; None keeps it
    codec:        how new blocks are written; blocks of every known codec are read
    basis:        name of the basis for new blocks, where the codec needs one; see `add_basis`
    eviction:     name of the tiers' policy
    admission:    "all", or "tinylfu": what a full tier keeps in place of something else
    trace:        file to which every access is appended (see ragcache/store/trace.py); None records nothing
    read_only:    `put`, `delete` and `sweep` raise StoreReadOnlyError; damaged blocks are not served, but stay
    referenced:   which of some keys chunks refer to. Then a block that another process deleted is not written again by
                  this one, and one that only this process holds outlives `refresh`
    foreign:      where blocks of no document are kept; it is looked into after the tiers, and closed with them.
                  `passages` lists them

    What a tier evicts goes to the next slower one, if it is not there. A block is in use until its tensors are gone; no
    tier evicts it before, and its bytes stay counted when it is deleted.

    Safe to call from several threads; several processes may share one root. Every block returned stays valid after it
    is evicted or deleted. Raises ConfigError for an unknown codec, policy or tier, a budget below 0, or a key that is
    no block key; TraceError when the trace cannot be written.
    """

    def __init__(
        self,
        root: Path,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        device_bytes: int = 0,
        disk_bytes: int | None = None,
        durable: str = "disk",
        remote: Connection | None = None,
        ttl_s: float | None = None,
        codec: str = "raw",
        basis: str | None = None,
        eviction: str = "lru",
        admission: str = "all",
        trace: str | Path | None = None,
        read_only: bool = False,
        referenced: Callable[[Iterable[str]], set[str]] | None = None,
        foreign: KVStore | None = None,
    ) -> None:
        self.root = Path(root)
        self.read_only = read_only
        self.disk_bytes = disk_bytes
        self.foreign = foreign
        self.passages = None if foreign is None else PassageList(foreign.root, foreign, read_only=foreign.read_only)
        self._new_policy: Callable[[], EvictionPolicy] = lambda: get_policy(eviction, admission)
        self._pins = Pins(self.root)
        self._device_bytes = device_bytes
        open_tier, budget = get_durable(durable), None if read_only else disk_bytes
        self._codec = get_codec(codec, Bases(lambda name: self._durable.get(name), basis))
        self._durable = open_tier(self.root, self._codec, budget, self._new_policy(), self._pins.__contains__)
        if remote is not None:
            self._durable = CachedTier(self._durable, RemoteTier(remote, self._codec), fills=not read_only)
        self._expiry = Expiry(ttl_s, self._durable, writable=not read_only)
        self._complaints = WarnOnce(log)
        self._counts = AccessCounts(None if trace is None else TraceWriter(Path(trace)))
        self._key_locks = KeyLocks()
        self._demotion = Demotion(self._durable, self._key_locks, read_only, referenced)
        memory = MemoryTier(memory_bytes, self._new_policy(), is_pinned=self._pins.__contains__)
        self._tiers = TierStack(self._durable, self._demotion, memory)

    def use_device(self, device: torch.device) -> None:
        """Say where the model is, once it is loaded: from now on there is a device tier, if it has a budget, and on
        CUDA host memory is page-locked. A second call adds no second tier."""
        self._tiers.on_device(device)
        device_bytes, self._device_bytes = self._device_bytes, 0
        if device_bytes:
            self._tiers.push(DeviceTier(device, device_bytes, self._new_policy(), is_pinned=self._pins.__contains__))

    def put(self, key: str, block: KVBlock, where: Where = "durable") -> KVBlock:
        """Keep a block; returns it as it is given back from any tier (law 6): its first use is like all later ones.

        where: "durable": in every tier, the durable one first: on return a kill loses nothing. A block for which that
                   tier has no room is held by the faster ones alone
               "memory": in this process alone, for a store that cannot be written, or is full
               "again": in the faster tiers, if the durable one still has it: it was computed though it was there
               "nowhere": only what would be given back

        Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError; then no tier holds anything new.
        """
        if where == "durable":
            self._refuse_if_read_only()
            with self._key_locks.hold(key):
                written = self._durable.put(key, block)
                self._demotion.stays(key)
                block = self._tiers.promote(key, written or self._durable.roundtrip(key, block))
                self._expiry.use(key)
        else:
            block = self._durable.roundtrip(key, block)
            with nullcontext() if where == "nowhere" else self._key_locks.hold(key):
                stored = where != "nowhere" and key in self._durable
                if where == "memory" and not stored:
                    self._demotion.passes(key)
                if where == "memory" or stored:
                    block = self._tiers.promote(key, block)
                    self._expiry.use(key)
        self._counts.made(key, block)
        return block

    def keep_foreign(self, key: str, block: KVBlock, owner: str, token_ids: Sequence[int]) -> KVBlock:
        """`put` into memory the block of a passage that no document has, and on disk where there is a place for such.
        See `PassageList.add`. Where that cannot take it, it costs a later question time, with a warning."""
        held = self.put(key, block, "memory")
        if self.foreign is not None and self.passages is not None and not self.read_only:
            try:
                self.foreign.put(key, held)
                self.passages.add(Listed(key, owner, token_ids, held.num_bytes))
            except StoreError as error:
                self._complaints.failed("KV of passages from elsewhere is not kept on disk", error)
        return held

    def foreign_usage(self) -> ForeignUsage | None:
        """Count what is kept of no document, walking through it; None where nothing is kept. Raises StoreError."""
        if self.foreign is None or self.passages is None:
            return None
        listed = self.passages.sizes()
        there = {key: one.num_bytes for key, one in self.foreign.lookup(self.foreign.keys()).items()}
        kept, gone = listed.keys() & there.keys(), listed.keys() - there.keys()
        num_bytes = sum(there[key] for key in kept)
        return ForeignUsage(
            passages=len(kept),
            bytes=num_bytes,
            prompt_bytes=sum(there.values()) - num_bytes,
            budget_bytes=self.foreign.disk_bytes or 0,
            evicted=len(gone),
            evicted_bytes=sum(listed[key] for key in gone),
        )

    def keep_prefixes(
        self, rows: Sequence[Listed], blocks: Iterable[KVBlock], generation: int, now: Callable[[], int]
    ) -> None:
        """Keep KV of prompts on disk, bit for bit, until a document changes; nothing where there is no place for it.

        Args:
            rows:       owners begin with PREFIX and the generation
            generation: of the documents that the prompts may quote
            now:        returns the documents' present generation

        Raises StoreError.
        """
        if self.foreign is None or self.passages is None or self.foreign.read_only:
            return
        self.passages.add(*rows)  # first: a block that is not listed would outlive its documents
        for row, block in zip(rows, blocks, strict=True):
            self.foreign.put(row.handle, block)
        self.passages.add(*rows)  # again, where another process has taken off what was not there yet
        if (current := now()) != generation:
            self.drop_prefixes(current)

    def drop_prefixes(self, generation: int) -> None:
        """Delete KV of prompts that may quote documents as they were before this generation (law 10)."""
        if self.foreign is not None and self.passages is not None and self.foreign.root.exists():
            old = self.passages.prefixes_before(generation)
            for key in old:
                self.foreign.delete(key)
            self.passages.remove(*old)

    def get(self, key: str) -> Loaded | None:
        """The block from the fastest tier that has it, kept in the faster ones from now on; None when no tier has it.

        A damaged block is logged, counted, dropped and not served: None. Raises SchemaVersionError when a newer
        version wrote the block: it stays.
        """
        loaded = self.fetch(key)
        self._counts.asked(key, loaded)
        return loaded

    def fetch(self, key: str) -> Loaded | None:
        """`get` that is no access yet: for who may not need the block in the end. What is used goes to `serve`."""
        with self._key_locks.hold(key):
            if self._drop_if_over(key):
                return None
            loaded = self._tiers.load(key, self._drop)
            if loaded is None and self.foreign is not None:
                return self.foreign.fetch(key)
            if loaded is not None:
                self._expiry.use(key)
            return loaded

    def ask(self, keys: Sequence[str]) -> str:
        """Say that one request wants these; what became of each, `serve` is told. Returns the request's name."""
        return self._counts.announced(keys)

    def serve(self, request: str, key: str, loaded: Loaded | None) -> None:
        """Count and trace an access that `ask` announced. None: no tier served it; it is traced when it is made."""
        self._counts.served(request, key, loaded)

    def lookup(self, keys: Iterable[str], where: Literal["any", "durable", "memory"] = "any") -> dict[str, Stored]:
        """The fastest tier that has each of these blocks, and the bytes that reading it moves; others are left out.
        Changes, reads and verifies nothing.

        where: "durable": what outlives this process, with the bytes that it takes there; "memory": what is in memory
               here, with no disk and no network asked
        """
        wanted = [key for key in keys if not self._is_over(key)]
        if where == "durable":
            sizes = self._durable.sizes(wanted)
            return {key: Stored(self._durable.name, size) for key, size in sizes.items() if size}
        found = self._tiers.lookup(wanted, memory_only=where == "memory")
        if where == "memory" or self.foreign is None:
            return found
        return {**found, **self.foreign.lookup([key for key in keys if key not in found])}

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
        """Whether a block can be gone that nobody deleted: the durable tier has, or had, a budget, or there is a time
        to live."""
        return self._expiry.ttl_s is not None or self._durable.has_been_bounded

    @property
    def codec(self) -> Codec:
        """The codec of new blocks: another one than the store's as long as that lacks its basis."""
        return self._codec.now

    @property
    def lacks_basis(self) -> bool:
        return self._codec.needs_basis and self._codec.bases.name is None

    def use_basis(self, name: str) -> None:
        """Encode new blocks with this basis, which is stored."""
        self._codec.bases.name = name

    def fit_basis(self, blocks: Sequence[KVBlock]) -> KVBlock:
        """A basis that is made from these passages' blocks. Raises BasisError when there are too few."""
        return self._codec.fit_basis(blocks)

    def add_basis(self, basis: KVBlock) -> str:
        """Store a basis and encode new blocks with it; returns its name, by which it is to be held. It is a block of
        the durable tier, and pinned: what it encoded cannot be read without it.

        Raises BasisError where there is no room for it, PinError, StoreFullError, StoreReadOnlyError.
        """
        self._refuse_if_read_only()
        name = basis_name(basis)
        if self._durable.put(name, basis, encoded=True) is None:
            raise BasisError(
                f"the {self._durable.name} tier has no room for a basis of {basis.num_bytes:,} bytes; give it more"
            )
        self.pin([name])
        self.use_basis(name)
        return name

    def delete(self, key: str) -> None:
        """Remove a block from every tier (law 10); an absent one is fine. Raises StoreReadOnlyError."""
        self._refuse_if_read_only()
        with self._key_locks.hold(key):
            for tier in self._tiers:
                tier.delete(key)
            self._demotion.stays(key)
            self._expiry.forget(key)
        self._pins.remove([key])
        if self.foreign is not None and self.passages is not None and self.foreign.root.exists():
            self.foreign.delete(key)
            self.passages.remove(key)

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
        memory still, and what another machine deleted on this one's disk. Blocks that were only remembered go too. What
        the durable tier's budget gave up stays while a chunk refers to it. A block that was handed down to it after
        its document was deleted is deleted as well.
        """
        self._pins.reload()
        self._demotion.delete_late()
        return self._tiers.drop_unwanted(copies=not self.read_only)

    def expire(self) -> list[str]:
        """Drop the blocks whose time to live is over from every tier; returns their keys."""
        self._refuse_if_read_only()
        if self._expiry.ttl_s is None:
            return []
        over = [key for tier in self._tiers for key in list(tier.keys()) if self._is_over(key)]
        for key in dict.fromkeys(over):
            with self._key_locks.hold(key):
                self._drop_if_over(key)
        return list(dict.fromkeys(over))

    def sweep(self, older_than_s: float = LEFTOVER_AGE_S) -> int:
        """Remove what killed writers left half done; returns how many. Nothing reads it, it only takes up space.

        Blocks whose time to live is over go, too.
        """
        self.expire()
        return self._durable.sweep(older_than_s)

    @property
    def evictions(self) -> int:
        """Blocks given up so far by tiers with a budget."""
        return sum(tier.evictions for tier in self._tiers)

    def stats(self) -> KVStats:
        """Count, walking through the durable tier: for people and monitoring, not for every question."""
        usage = {tier.name: tier.usage() for tier in self._tiers}
        return KVStats(
            blocks=usage[self._durable.name].blocks,
            bytes_by_tier={name: use.num_bytes for name, use in usage.items()},
            hits_by_tier={name: self._counts.hits[name] for name in usage},
            misses=self._counts.misses,
            damaged=self._counts.damaged,
            evictions=self.evictions,
            pinned=len(self._pins),
        )

    def close(self) -> None:
        """Close the tiers and the trace. Blocks that were returned stay valid. A second call is fine."""
        for tier in self._tiers:
            tier.close()
        self._demotion.delete_late()
        self._counts.close()
        if self.foreign is not None and self.passages is not None:
            self.passages.close()
            self.foreign.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _is_over(self, key: str) -> bool:
        return key not in self._pins and self._expiry.is_over(key)

    def _drop_if_over(self, key: str) -> bool:
        """Drop a block whose time is over. Whether it can be removed or not, it is not served."""
        over = self._is_over(key)
        for tier in (self._tiers.volatile if self.read_only else self._tiers) if over else ():
            try:
                tier.delete(key)
            except (StoreError, OSError) as error:
                self._complaints.failed(f"block {key} cannot be removed", error)
        if over and not self.read_only:
            self._expiry.forget(key)
        return over

    def _refuse_too_many_pins(self, pinned: frozenset[str]) -> None:
        missing = pinned - self._pins.keys - self._tiers.lookup(pinned).keys()
        if missing:
            raise MissingBlockError(f"no tier has the block {min(missing)}; it has to be computed before it is pinned")
        self._tiers.refuse_too_many(pinned)

    def _drop(self, key: str, tier: Tier, error: DamagedBlockError) -> None:
        log.warning("%s; dropped from %s", error, tier.name)
        self._counts.found_damaged()
        if self.read_only:
            return
        try:
            tier.delete(key)
        except (StoreError, OSError) as problem:  # it is not served, whether or not it can be removed
            log.warning("%s: the damaged block cannot be removed: %s", key, problem)

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise StoreReadOnlyError(f"{self.root}: opened read-only; open it for writing to change it")


def collect_garbage(documents: DocumentStore, kv: KVStore) -> int:
    """Delete the blocks on the documents' list of garbage from every tier; returns how many.

    The list is cleared last: a kill in between loses no deletion, it is only done again. The caller holds the store's
    writer lock.
    """
    kv.drop_prefixes(documents.generation())
    handles = documents.collectable()
    for handle in handles:
        kv.delete(handle)
    if handles:
        documents.clear_garbage(handles)
    return len(handles)
