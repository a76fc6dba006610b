"""Blocks by key over a stack of tiers, of which the last is durable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, Self

from ragcache import errors
from ragcache.codecs import Bases, Codec, get_codec
from ragcache.codecs.basis import basis_name
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import torch
from ragcache.seal import UNSEALED, Seal
from ragcache.store.counters import AccessCounts, KVStats, Loaded
from ragcache.store.documents import DocumentStore
from ragcache.store.eviction import EvictionPolicy, get_policy
from ragcache.store.foreign import ForeignUsage, Listed, PassageList
from ragcache.store.pins import Pins
from ragcache.store.remote.connection import Connection
from ragcache.store.retention import Expiry
from ragcache.store.tiers import CachedTier, DeviceTier, DiskTier, DurableTier, MemoryTier, RemoteTier, Tier
from ragcache.store.tiers.demotion import Demotion
from ragcache.store.tiers.key_locks import KeyLocks
from ragcache.store.tiers.stack import Stored, TierStack
from ragcache.store.warn_once import WarnOnce

Where = Literal["durable", "memory", "again", "nowhere"]
DEFAULT_MEMORY_BYTES = 2 * 1024**3
LEFTOVER_AGE_S = 3600.0

log = logging.getLogger(__name__)


class KVStore:
    """Content-addressed KV blocks in a stack of tiers: the model's device, host memory and a durable tier.

    root:         directory of the pins and of the durable tier's files on this machine; created by the first `put`
    memory_bytes: budget of the memory tier
    device_bytes: budget of the device tier, which `use_device` adds; 0: no device tier
    disk_bytes:   budget of the durable tier; None keeps every block
    remote:       connection to a store outside this machine that keeps the blocks; this machine then holds copies,
                  within disk_bytes
    ttl_s:        seconds after which an unused block is dropped; None keeps it
    codec:        codec of new blocks; blocks of every known codec are read
    basis:        name of the basis for new blocks, if the codec needs a basis; see `add_basis`
    eviction:     name of the tiers' eviction policy
    admission:    "all", or "tinylfu": whether a full tier may refuse a new block to keep those that it has
    read_only:    `put`, `delete` and `sweep` raise StoreReadOnlyError; damaged blocks are not served, but not deleted
    referenced:   returns which of the given keys chunks refer to. With it, this process does not write a block again
                  that another process deleted, and `refresh` keeps a referenced block that only this process holds
    seal:         seal of the durable tier's files; a remote's connection has its own
    alive:        raises StoreNotFoundError once the store was removed, so that no write makes its folder anew
    foreign:      store of the blocks that belong to no document; it is searched after the tiers, and closed with them.
                  `passages` lists its blocks

    A block that a tier evicts goes to the next slower tier, unless that already has it. A block is in use until its
    tensors are freed; until then no tier evicts it, and its bytes are counted even after `delete`.

    Safe to call from several threads; several processes may share one root. Every block returned stays valid after it
    is evicted or deleted. Raises ConfigError for an unknown codec or policy, a budget below 0, or a malformed block
    key.
    """

    def __init__(
        self,
        root: Path,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        device_bytes: int = 0,
        disk_bytes: int | None = None,
        remote: Connection | None = None,
        ttl_s: float | None = None,
        codec: str = "raw",
        basis: str | None = None,
        eviction: str = "hyperbolic",
        admission: str = "all",
        read_only: bool = False,
        referenced: Callable[[Iterable[str]], set[str]] | None = None,
        foreign: KVStore | None = None,
        seal: Seal = UNSEALED,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = Path(root)
        self.read_only = read_only
        self.disk_bytes = disk_bytes
        self.foreign = foreign
        self.seal = seal
        self._remote = remote
        self._alive = alive
        self.passages = None if foreign is None else PassageList(foreign.root, foreign, read_only=foreign.read_only)
        self._new_policy: Callable[[], EvictionPolicy] = lambda: get_policy(eviction, admission)
        self._pins = Pins(self.root)
        self._device_bytes = device_bytes
        self._codec = get_codec(codec, Bases(lambda name: self._durable.get(name), basis))
        budget = None if read_only else disk_bytes
        self._durable: DurableTier = DiskTier(
            self.root, self._codec, budget, self._new_policy(), self._pins.__contains__, seal
        )
        if remote is not None:
            self._durable = CachedTier(self._durable, RemoteTier(remote, self._codec), fills=not read_only)
        self._expiry = Expiry(ttl_s, self._durable, writable=not read_only)
        self._complaints = WarnOnce(log)
        self._counts = AccessCounts()
        self._key_locks = KeyLocks()
        self._demotion = Demotion(self._durable, self._key_locks, read_only, referenced)
        memory = MemoryTier(memory_bytes, self._new_policy(), is_pinned=self._pins.__contains__)
        self._tiers = TierStack(self._durable, self._demotion, memory)

    def use_device(self, device: torch.device) -> None:
        """Add the device tier, if it has a budget, and page-lock host memory if the device is CUDA. Call it once the
        model is loaded; a second call adds no second tier."""
        self._tiers.on_device(device)
        device_bytes, self._device_bytes = self._device_bytes, 0
        if device_bytes:
            self._tiers.push(DeviceTier(device, device_bytes, self._new_policy(), is_pinned=self._pins.__contains__))

    def put(self, key: str, block: KVBlock, where: Where = "durable") -> KVBlock:
        """Store a block. Return it exactly as any tier will return it later (law 6), so that its first use equals all
        others.

        where: "durable": in every tier, the durable tier first: once `put` returns, a kill loses nothing. If the
               durable tier has no room for the block, only the faster tiers hold it
               "memory": in this process alone, for a store that is full or cannot be written
               "again": in the faster tiers, if the durable tier still has it: the block was computed although it was
                   stored
               "nowhere": store nothing, only return the block as it would be returned later

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
        return block

    def keep_foreign(self, key: str, block: KVBlock, owner: str, token_ids: Sequence[int]) -> KVBlock:
        """Put the block of a passage that belongs to no document into memory, and also into the foreign store, if there
        is one. See `PassageList.add`. If the foreign store cannot be written, warn; the block is then computed again
        later."""
        held = self.put(key, block, "memory")
        if self.foreign is not None and self.passages is not None and not self.read_only:
            try:
                self.foreign.put(key, held)
                self.passages.add(Listed(key, owner, token_ids, held.num_bytes))
            except errors.StoreError as error:
                self._complaints.failed("KV of passages from elsewhere is not kept on disk", error)
        return held

    def foreign_usage(self) -> ForeignUsage | None:
        """Count the foreign store's blocks by walking through it; return None without a foreign store. Raises
        StoreError."""
        if self.foreign is None or self.passages is None:
            return None
        listed = self.passages.sizes()
        there = {key: stored.num_bytes for key, stored in self.foreign.lookup(self.foreign.keys()).items()}
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

    def unlearn(
        self, texts: Iterable[tuple[Sequence[str], Sequence[int]]] = (), *, dropped: Iterable[str] = ()
    ) -> list[str]:
        """Delete passages that were learnt from prompts; return their handles. See `PassageList.unlearn`.

        Raises StoreReadOnlyError, StoreFullError, StoreBusyError.
        """
        self._refuse_if_read_only()
        gone = [] if self.passages is None else self.passages.unlearn(texts, dropped)
        for key in gone:
            self.delete(key)
        return gone

    def keep_prefixes(
        self, rows: Sequence[Listed], blocks: Iterable[KVBlock], generation: int, now: Callable[[], int]
    ) -> None:
        """Store KV of prompts on disk, bit for bit, until a document changes. Do nothing without a writable foreign
        store.

        Args:
            rows:       the prompts' entries in the list; each owner begins with PREFIX and the generation
            blocks:     a block for each row
            generation: generation of the documents that the prompts may quote
            now:        returns the documents' present generation

        Raises StoreError.
        """
        if self.foreign is None or self.passages is None or self.foreign.read_only:
            return
        self.foreign._refuse_if_read_only()
        self.passages.add(*rows)  # before the blocks: a block that is not listed would outlive its documents
        for row, block in zip(rows, blocks, strict=True):
            self.foreign.put(row.handle, block)
        self.passages.add(*rows)  # again: another process may have removed rows whose blocks did not exist yet
        if (current := now()) != generation:
            self.drop_prefixes(current)

    def drop_prefixes(self, generation: int) -> None:
        """Delete KV of prompts that may quote documents from before this generation (law 10)."""
        if self.foreign is not None and self.passages is not None and self.foreign.root.exists():
            old = self.passages.prefixes_before(generation)
            for key in old:
                self.foreign.delete(key)
            self.passages.remove(*old)

    def get(self, key: str) -> Loaded | None:
        """Return the block from the fastest tier that has it, and keep it in the faster tiers; None if no tier has it.

        A damaged block is logged, counted and dropped, and the next tier is tried. Raises SchemaVersionError when a
        newer version wrote the block; that block stays.
        """
        loaded = self.fetch(key)
        self._counts.count(loaded)
        return loaded

    def fetch(self, key: str) -> Loaded | None:
        """Load a block as `get` does, but count no access, since the caller may not need the block. Report the blocks
        that are used with `count`."""
        with self._key_locks.hold(key):
            if self._drop_if_over(key):
                return None
            loaded = self._tiers.load(key, self._drop)
            if loaded is None and self.foreign is not None:
                return self.foreign.fetch(key)
            if loaded is not None:
                self._expiry.use(key)
            return loaded

    def count(self, loaded: Loaded | None) -> None:
        """Count an access to a block that `fetch` has loaded. None means that no tier served the block."""
        self._counts.count(loaded)

    def lookup(self, keys: Iterable[str], where: Literal["any", "durable", "memory"] = "any") -> dict[str, Stored]:
        """Return, for each block that is held, the fastest tier that has it and the bytes that reading it moves. Blocks
        that are not held are left out. Change, read and verify nothing.

        where: "any": every tier, then the foreign store
               "durable": only the durable tier, with the bytes that each block takes there
               "memory": only the tiers in this process's memory; no disk and no network access
        """
        needed = [key for key in keys if not self._is_over(key)]
        if where == "durable":
            sizes = self._durable.sizes(needed)
            return {key: Stored(self._durable.name, size) for key, size in sizes.items() if size}
        found = self._tiers.lookup(needed, memory_only=where == "memory")
        if where == "memory" or self.foreign is None:
            return found
        return {**found, **self.foreign.lookup([key for key in keys if key not in found])}

    def __contains__(self, key: object) -> bool:
        return any(key in tier for tier in self._tiers) and not self._is_over(str(key))

    def pin(self, keys: Iterable[str]) -> None:
        """Keep these blocks from eviction and expiry until `unpin` or `delete`. Pins persist when the store is
        reopened.

        Other processes observe the pins from their next `refresh` on. Raises MissingBlockError for a block that no tier
        has, PinError when the pinned blocks would leave a budget no room for others, StoreReadOnlyError; then no new
        block is pinned.
        """
        self._refuse_if_read_only()
        self._pins.add(keys, self._refuse_too_many_pins)

    def unpin(self, keys: Iterable[str]) -> None:
        """Allow blocks to be evicted and to expire again. Blocks that are not pinned are ignored. Raises
        StoreReadOnlyError."""
        self._refuse_if_read_only()
        self._pins.remove(keys)

    @property
    def pinned(self) -> frozenset[str]:
        return self._pins.keys

    @property
    def gives_up(self) -> bool:
        """Return whether a block can disappear without `delete`.

        That is so if the durable tier has, or had, a budget, or if blocks expire.
        """
        return self._expiry.ttl_s is not None or self._durable.has_been_bounded

    @property
    def codec(self) -> Codec:
        """Return the codec of new blocks: a substitute while the store's own codec lacks its basis."""
        return self._codec.now

    @property
    def lacks_basis(self) -> bool:
        return self._codec.needs_basis and self._codec.bases.name is None

    def use_basis(self, name: str) -> None:
        """Encode new blocks with this basis, which must be stored already."""
        self._codec.bases.name = name

    def fit_basis(self, blocks: Sequence[KVBlock]) -> KVBlock:
        """Return a basis fitted to these passages' blocks. Raises BasisError when there are too few."""
        return self._codec.fit_basis(blocks)

    def add_basis(self, basis: KVBlock) -> str:
        """Store a basis and encode new blocks with it. Return its name, which the caller has to record with
        `hold_basis`. The basis is a block of the durable tier and is pinned: blocks encoded with it cannot be read
        without it.

        Raises BasisError if the tier has no room for it, PinError, StoreFullError, StoreReadOnlyError.
        """
        self._refuse_if_read_only()
        name = basis_name(basis)
        if self._durable.put(name, basis, encoded=True) is None:
            raise errors.BasisError(
                f"the {self._durable.name} tier has no room for a basis of {basis.num_bytes:,} bytes; give it more"
            )
        self.pin([name])
        self.use_basis(name)
        return name

    def delete(self, key: str) -> None:
        """Delete a block from every tier (law 10); an absent block is fine. Raises StoreReadOnlyError."""
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
        """Return the keys of the durable tier. A block that no chunk refers to is an orphan; `doctor` collects
        orphans."""
        return self._durable.keys()

    def read(self, key: str) -> KVBlock | None:
        """Return the durable tier's block, or None, without keeping it in faster tiers or counting an access.

        Raises DamagedBlockError, SchemaVersionError.
        """
        return self._durable.get(key)

    def verify(self, key: str) -> None:
        """Read a block from the durable tier and check it, without returning it.

        Raises MissingBlockError, DamagedBlockError, SchemaVersionError.
        """
        self._durable.verify(key)

    def reject(self, key: str, error: errors.BlockError) -> None:
        """Drop a block whose content does not fit its passage from every tier, so that it is computed again.

        error: states the difference, for the log
        """
        for tier in self._tiers.volatile if self.read_only else self._tiers:
            self._remove(key, tier)
        log.warning("block %s: %s; dropped", key, error)
        self._counts.found_damaged()

    def reseal(self) -> tuple[int, int]:
        """Write every block again, sealed with the store's present secret. Return how many were written, and how many
        were dropped because they are damaged, or none of the store's secrets opens them.

        The caller holds the store's writer lock. Raises StoreFullError, StoreReadOnlyError, StoreUnreachableError,
        SchemaVersionError.
        """
        self._refuse_if_read_only()
        written, dropped = (0, 0) if self.foreign is None else self.foreign.reseal()
        for key in list(self._durable.keys()):
            with self._key_locks.hold(key):
                used_at = self._durable.used_at(key)
                try:
                    block = self._durable.get(key)
                    block = block and block.map(torch.clone)  # which does not keep the file in use
                    kept = block and self._durable.put(key, block, encoded=True)
                except (errors.DamagedBlockError, errors.UnencodableBlockError) as error:
                    log.warning("%s; dropped", error)
                    self._durable.delete(key)
                    kept = None
                if kept is not None and used_at is not None:
                    self._durable.mark_used(key, used_at)
            written, dropped = written + (kept is not None), dropped + (kept is None)
        if self._remote is not None:
            self._remote.reseal()
        return written, dropped

    def refresh(self) -> int:
        """Drop the blocks in memory that the durable tier does not have; return how many left memory.

        Call it when the document store's generation has advanced: blocks that another process deleted are still in this
        process's memory, and blocks that another machine deleted are still on this machine's disk. Blocks that were put
        into memory only are dropped too. A block that the durable tier evicted stays while a chunk refers to it. A
        block that eviction wrote to the durable tier after its document was deleted is deleted there.
        """
        self._pins.reload()
        self._demotion.delete_late()
        return self._tiers.drop_unwanted(copies=not self.read_only)

    def expire(self) -> list[str]:
        """Drop the expired blocks from every tier and return their keys. Raises StoreReadOnlyError."""
        self._refuse_if_read_only()
        if self._expiry.ttl_s is None:
            return []
        over = [key for tier in self._tiers for key in list(tier.keys()) if self._is_over(key)]
        for key in dict.fromkeys(over):
            with self._key_locks.hold(key):
                self._drop_if_over(key)
        return list(dict.fromkeys(over))

    def sweep(self, older_than_s: float = LEFTOVER_AGE_S) -> int:
        """Remove unfinished files of killed writers and return how many; they are never read and only take up space.

        Expired blocks are dropped too.
        """
        self.expire()
        return self._durable.sweep(older_than_s)

    @property
    def evictions(self) -> int:
        """Return how many blocks the tiers have evicted so far."""
        return sum(tier.evictions for tier in self._tiers)

    def stats(self) -> KVStats:
        """Count blocks, bytes and accesses. This walks through the durable tier, so it is for people and monitoring,
        not for every question."""
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
        """Close the tiers. Blocks that were returned stay valid. A second call is fine."""
        for tier in self._tiers:
            tier.close()
        self._demotion.delete_late()
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
        """Drop a block if it has expired and return whether it has. An expired block that cannot be deleted is still
        not served."""
        over = self._is_over(key)
        for tier in (self._tiers.volatile if self.read_only else self._tiers) if over else ():
            try:
                tier.delete(key)
            except (errors.StoreError, OSError) as error:
                self._complaints.failed(f"block {key} cannot be removed", error)
        if over and not self.read_only:
            self._expiry.forget(key)
        return over

    def _refuse_too_many_pins(self, pinned: frozenset[str]) -> None:
        missing = pinned - self._pins.keys - self._tiers.lookup(pinned).keys()
        if missing:
            raise errors.MissingBlockError(
                f"no tier has the block {min(missing)}; it has to be computed before it is pinned"
            )
        self._tiers.refuse_too_many(pinned)

    def _drop(self, key: str, tier: Tier, error: errors.DamagedBlockError) -> None:
        log.warning("%s; dropped from %s", error, tier.name)
        self._counts.found_damaged()
        if not self.read_only:
            self._remove(key, tier)

    def _remove(self, key: str, tier: Tier) -> None:
        try:
            tier.delete(key)
        except (errors.StoreError, OSError) as problem:  # it is not served, whether or not it can be removed
            log.warning("%s: the damaged block cannot be removed: %s", key, problem)

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise errors.StoreReadOnlyError(f"{self.root}: opened read-only; open it for writing to change it")
        self._alive()


def collect_garbage(documents: DocumentStore, kv: KVStore) -> int:
    """Delete the blocks on the documents' list of garbage from every tier; return how many.

    The list is cleared last: after a kill in between, the deletions are done again and none is lost. The caller holds
    the store's writer lock.
    """
    kv.drop_prefixes(documents.generation())
    handles = documents.collectable()
    for handle in handles:
        kv.delete(handle)
    if handles:
        documents.clear_garbage(handles)
    return len(handles)
