"""A byte budget over a directory of blocks, kept jointly by all processes that set a budget."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from filelock import FileLock, Timeout

from ragcache.errors import StoreBusyError, check_least, translate_os_errors
from ragcache.files import is_leftover, make_directory
from ragcache.store.eviction import Entry, EvictionPolicy
from ragcache.store.ledger import ByteLedger, never
from ragcache.store.tiers.block_names import BlockFile, BlockFiles

BUSY_AFTER_S = 30.0
BOOKS = ".budget"


class NoRoomError(Exception):
    """A block does not fit, or is worth less than its victims. Never leaves the disk tier."""


class Reservation(NamedTuple):
    """Bytes that were reserved, and the epoch of the books at that time."""

    num_bytes: int
    epoch: int


@dataclass
class _Books:
    """Contents of the counter file.

    epoch:       increases whenever the directory is counted again
    total_bytes: the sum of all sizes
    """

    epoch: int
    total_bytes: int


@dataclass(eq=False, repr=False)
class DiskBudget:
    """A limit of budget_bytes on the sizes of all files below a root, temporary files included, at every moment.

    The limit applies to the directory itself: before a writer writes the first byte, it extends its temporary file to
    its final size, under a lock that all processes share. Victims are deleted before that, under the same lock. A small
    file beside the blocks holds the sum of all sizes, so that no process has to walk the directory for every block. The
    sum is never too low. A kill can leave it too high, so every process that opens the root computes it again.

    Several processes share the limit if each sets a budget; files of a process without a budget are noticed only when
    space is needed. A block in use is never evicted by its own process; when another process evicts it, the file system
    frees the bytes as soon as their use ends.
    """

    _files: BlockFiles
    budget_bytes: int
    _policy: EvictionPolicy
    is_pinned: InitVar[Callable[[str], bool]] = never

    def __post_init__(self, is_pinned: Callable[[str], bool]) -> None:
        check_least("disk_bytes", self.budget_bytes, 0)
        self._ledger = ByteLedger(self.budget_bytes, self._policy, is_pinned)
        self._leaving: set[str] = set()
        self._lock = threading.Lock()  # guards the ledger; never held during file operations, except for the first walk
        self._one_thread = threading.Lock()  # threads wait here, as the file lock can only be polled
        self._file_lock = FileLock(self._files.root / ".budget.lock", thread_local=False)
        self._counter = self._files.root / BOOKS
        self._indexed = self._counted = False

    @property
    def evictions(self) -> int:
        return self._ledger.evictions

    def reserve(self, entry: Entry, file: BinaryIO) -> Reservation:
        """Free space for the entry and extend `file`, which is empty and below the root, to the entry's size.

        An earlier file of the key is deleted first if there is no room for both. Raises NoRoomError; then nothing else
        was evicted. Raises StoreBusyError, StoreReadOnlyError.
        """
        if entry.num_bytes > self.budget_bytes:
            raise NoRoomError
        with self._alone() as books:
            if self._taken(books) + entry.num_bytes > self.budget_bytes:
                self._unlink(books, entry.key)
            self._make_room(books, entry)
            # Write the sum first: it may be too high, but never too low.
            self._write(books, books.total_bytes + entry.num_bytes)
            os.truncate(file.fileno(), entry.num_bytes)
            return Reservation(entry.num_bytes, books.epoch)

    def rename(self, temporary: Path, path: Path, entry: Entry) -> None:
        """Give the reserved file its final name, and subtract the bytes of a file that it replaces. Raises
        StoreBusyError, StoreReadOnlyError."""
        with self._alone() as books:
            replaced = self._files.size(entry.key) or 0
            os.replace(temporary, path)
            self._write(books, books.total_bytes - replaced)
            with self._lock:
                self._ledger.remove(entry.key)
                self._ledger.add(entry)

    def release(self, reservation: Reservation) -> None:
        """Subtract the bytes of a reserved file that was deleted from the sum. If the directory has been counted again
        since the reservation, the sum stays: it may already exclude them."""
        with suppress(OSError), self._alone() as books:
            if books.epoch == reservation.epoch:
                self._write(books, books.total_bytes - reservation.num_bytes)

    def lease(self, key: str) -> Callable[[], None] | None:
        """Mark a block as used and in use. Return a function that ends the use, or None if the block is absent."""
        self._index()
        with self._lock:
            self._ledger.touch(key)
            if key in self._leaving:
                return None
            if key not in self._ledger:
                if (size := self._files.size(key)) is None:
                    return None
                self._ledger.add(Entry(key, size, 0))  # another process has written it
            return self._ledger.lease(key)

    def remove(self, key: str) -> None:
        """Delete a block's file. Raises StoreReadOnlyError, StoreBusyError."""
        with self._alone() as books:
            self._unlink(books, key)

    def forget(self, key: str) -> None:
        """Forget a block whose file turned out to be missing."""
        with self._lock:
            self._ledger.remove(key)

    def sweep(self, older_than_s: float) -> int:
        """Remove the temporary files of killed writers and return how many."""
        with self._alone() as books:
            leftovers = [file for file in self._files.walk() if is_leftover(file.path, older_than_s)]
            for file in leftovers:
                file.path.unlink(missing_ok=True)
                self._write(books, books.total_bytes - file.num_bytes)
        return len(leftovers)

    def _make_room(self, books: _Books, entry: Entry) -> None:
        """Evict until the entry fits. Each round forgets its victims, whether or not their files exist, so the loop
        ends."""
        walked = False
        while (excess := self._taken(books) + entry.num_bytes - self.budget_bytes) > 0:
            victims = self._take_victims(entry, excess)
            if victims is None:
                if walked:
                    raise NoRoomError
                self._count(books)  # other processes may have written or released blocks since the last count
                walked = True
                continue
            for victim in victims:
                self._unlink_file(books, victim.key)
            with self._lock:
                self._leaving.difference_update(victim.key for victim in victims)

    def _taken(self, books: _Books) -> int:
        """Return the bytes in the directory plus the deleted bytes in use by this process: the device holds both."""
        with self._lock:
            self._ledger.collect()
            return books.total_bytes + self._ledger.ghost_bytes

    def _take_victims(self, entry: Entry, excess_bytes: int) -> list[Entry] | None:
        with self._lock:
            victims = self._ledger.victims(excess_bytes)
            if victims is not None and not self._ledger.admits(entry.key, victims):
                raise NoRoomError
            for victim in victims or ():
                self._ledger.evict(victim.key)
                self._leaving.add(victim.key)
            return victims

    def _unlink(self, books: _Books, key: str) -> None:
        with self._lock:
            self._ledger.remove(key)
        self._unlink_file(books, key)

    def _unlink_file(self, books: _Books, key: str) -> None:
        size = self._files.size(key)
        if size is not None:
            self._files.path(key).unlink(missing_ok=True)
            self._write(books, books.total_bytes - size)

    # The sum that all processes share

    @contextmanager
    def _alone(self) -> Iterator[_Books]:
        """Yield the books while no other thread or process can use them."""
        with self._one_thread, translate_os_errors(self._files.root):
            make_directory(self._files.root)
            try:
                self._file_lock.acquire(timeout=BUSY_AFTER_S, poll_interval=0.002)
            except Timeout as error:
                raise StoreBusyError(
                    f"{self._files.root}: another process keeps the disk budget's lock for {BUSY_AFTER_S:.0f} s"
                ) from error
            try:
                books = self._read()
                if not self._counted:
                    self._count(books)
                    self._counted = True
                yield books
            finally:
                self._file_lock.release()

    def _count(self, books: _Books) -> None:
        """Compute the sum and the list of blocks by walking the directory. Delete leftovers of killed writers."""
        found, total = [], 0
        for file in self._files.walk():
            if is_leftover(file.path, 0.0):
                file.path.unlink(missing_ok=True)
                continue
            total += file.num_bytes
            if file.key is not None:
                found.append(file)
        with self._lock:
            self._take_stock(found)
        books.epoch += 1
        self._write(books, total)

    def _read(self) -> _Books:
        try:
            return _Books(*struct.unpack("<qq", self._counter.read_bytes()))
        except (FileNotFoundError, struct.error):  # new, or truncated by a power cut
            self._counted = False
            return _Books(time.time_ns(), 0)

    def _write(self, books: _Books, total_bytes: int) -> None:
        books.total_bytes = max(0, total_bytes)
        descriptor = os.open(self._counter, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, struct.pack("<qq", books.epoch, books.total_bytes), 0)
        finally:
            os.close(descriptor)

    # This process's list of the blocks

    def _index(self) -> None:
        """List the existing blocks at first use."""
        if self._indexed:
            return
        with self._lock:
            if not self._indexed:
                self._take_stock([file for file in self._files.walk() if file.key is not None])

    def _take_stock(self, found: list[BlockFile]) -> None:
        """Make the ledger list exactly the blocks that were found; new blocks are added in order of their last use."""
        there = {file.key for file in found}
        for key in set(self._ledger.keys()) - there:
            self._ledger.remove(key)
        for file in sorted(found, key=lambda file: file.used_at):
            if file.key is not None and file.key not in self._ledger:
                self._ledger.add(Entry(file.key, file.num_bytes, 0))
        self._indexed = True
