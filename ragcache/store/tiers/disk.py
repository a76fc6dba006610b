"""A durable tier on local disk, with one file per block."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ragcache.codecs import Codec
from ragcache.codecs.block_file import check_finite, read_block, write_block
from ragcache.errors import MissingBlockError, translate_os_errors
from ragcache.files import PAGE, flush_directory, is_cached, is_leftover, read_at
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import Tensor, torch
from ragcache.seal import UNSEALED, Seal
from ragcache.store.eviction import LRU, Entry, EvictionPolicy
from ragcache.store.last_use import leased
from ragcache.store.ledger import never
from ragcache.store.tiers.block_names import BlockFiles
from ragcache.store.tiers.disk_budget import BOOKS, DiskBudget, NoRoomError, Reservation
from ragcache.store.tiers.tier import DurableTier, Room, TierUsage

log = logging.getLogger(__name__)


class DiskTier(BlockFiles, DurableTier):
    """The files of blocks below a root. New blocks are encoded by `codec`; blocks of any known codec are read.

    budget_bytes: limit for all files together, see DiskBudget; None keeps every block
    policy:       which block is evicted for another; LRU when None

    A deleted file stays readable for processes that have mapped it. With a budget, a returned block is in use until its
    tensors are freed, and is not evicted before.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        codec: Codec,
        budget_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        is_pinned: Callable[[str], bool] = never,
        seal: Seal = UNSEALED,
    ) -> None:
        super().__init__(root)
        self.codec = codec
        self.seal = seal
        self._direct = False
        self._budget = None if budget_bytes is None else DiskBudget(self, budget_bytes, policy or LRU(), is_pinned)

    @property
    def budget_bytes(self) -> int | None:
        return None if self._budget is None else self._budget.budget_bytes

    @property
    def has_been_bounded(self) -> bool:
        return self._budget is not None or (self.root / BOOKS).exists()

    @property
    def evictions(self) -> int:
        return 0 if self._budget is None else self._budget.evictions

    def put(self, key: str, block: KVBlock, *, encoded: bool = False) -> KVBlock | None:
        """Write a block whole and flush it to the device; return None if the budget has no room for it.

        An earlier file of the key exists until the new one replaces it, unless the budget has no room for both. Raises
        StoreFullError, StoreReadOnlyError, UnencodableBlockError; then no partial file remains.
        """
        path, budget, codec = self.path(key), self._budget, self.codec_for(block, encoded)
        if budget is None:
            return write_block(path, key, block, codec, seal=self.seal)
        reservations: list[Reservation] = []

        def reserve(file: BinaryIO, num_bytes: int) -> None:
            reservations.append(budget.reserve(Entry(key, num_bytes, block.num_tokens), file))

        def rename(temporary: Path, path: Path) -> None:
            budget.rename(temporary, path, Entry(key, reservations[0].num_bytes, block.num_tokens))

        try:
            return write_block(path, key, block, codec, reserve=reserve, rename=rename, seal=self.seal)
        except NoRoomError:
            return None
        except BaseException:
            for reservation in reservations:
                budget.release(reservation)
            raise

    def get(self, key: str, room: Room | None = None) -> KVBlock | None:
        """Return the block. Its tensors are in `room`, or alias the mapped file if the codec allows it. Raises
        DamagedBlockError, SchemaVersionError."""
        path = self.path(key)
        if self._budget is not None:
            return self._get_leased(path, key, self._budget, room)
        try:
            return read_block(path, key, self.codec.bases, partial(self._read, room), seal=self.seal)
        except MissingBlockError:
            return None

    def verify(self, key: str) -> None:
        check_finite(key, read_block(self.path(key), key, self.codec.bases, seal=self.seal))

    def delete(self, key: str) -> None:
        """Delete a block's file and flush the deletion to the device. Raises StoreReadOnlyError."""
        path = self.path(key)
        with translate_os_errors(path), suppress(FileNotFoundError, NotADirectoryError):
            if self._budget is None:
                path.unlink()
            elif path.parent.is_dir():
                self._budget.remove(key)
            flush_directory(path.parent)

    def usage(self) -> TierUsage:
        sizes = [file.num_bytes for file in self.walk() if file.key is not None]
        return TierUsage(len(sizes), sum(sizes))

    def sweep(self, older_than_s: float) -> int:
        if self._budget is not None:
            return self._budget.sweep(older_than_s)
        leftovers = [path for path in self.paths() if is_leftover(path, older_than_s)]
        for path in leftovers:
            with translate_os_errors(path):
                path.unlink(missing_ok=True)
        return len(leftovers)

    def on_device(self, device: torch.device) -> None:
        self._direct = self._direct or device.type == "cuda"

    def _read(self, room: Room | None, descriptor: int, offset: int, num_bytes: int) -> Tensor | None:
        """Read bytes of a file into the room; return None if there is no room. On CUDA the page cache is bypassed,
        unless it already holds the file or the room cost another block: the block stays in memory and need not be held
        twice."""
        direct = self._direct and offset % PAGE == 0
        buffer = None if room is None else room.take(-(-num_bytes // PAGE) * PAGE if direct else num_bytes)
        if room is None or buffer is None:
            return None
        into = memoryview(buffer.numpy())  # type: ignore[arg-type]
        direct = direct and room.is_spare and buffer.data_ptr() % PAGE == 0 and not is_cached(descriptor, num_bytes)
        try:
            read_at(descriptor, offset, num_bytes, into, direct=direct)
        except OSError as error:
            if not direct or error.errno == errno.EIO:
                raise
            self._direct = False
            log.warning("%s: read through the page cache: O_DIRECT is refused (%s)", self.root, error.strerror)
            read_at(descriptor, offset, num_bytes, into)
        return buffer[:num_bytes]

    def _get_leased(self, path: Path, key: str, budget: DiskBudget, room: Room | None) -> KVBlock | None:
        release = budget.lease(key)
        if release is None:
            return None
        try:
            block = read_block(path, key, self.codec.bases, partial(self._read, room), seal=self.seal)
        except MissingBlockError:
            release()
            budget.forget(key)
            return None
        except BaseException:
            release()
            raise
        self.mark_used(key, time.time())  # persistent, and visible to other processes
        if room is not None and room.buffer is not None:  # the block was copied, so the file is not in use
            release()
            return block
        return leased(block, release)
