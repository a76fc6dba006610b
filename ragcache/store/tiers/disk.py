"""One file a block on local disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ragcache.codecs import Codec
from ragcache.codecs.block_file import read_block, write_block
from ragcache.errors import MissingBlockError, translate_os_errors
from ragcache.files import flush_directory, is_leftover
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import LRU, Entry, EvictionPolicy
from ragcache.store.ledger import leased, never
from ragcache.store.tiers.disk_budget import BOOKS, BlockFiles, Claimed, DiskBudget, NoRoomError
from ragcache.store.tiers.tier import DurableTier, TierUsage


class DiskTier(BlockFiles, DurableTier):
    """The files of blocks below a root. Blocks are encoded by `codec` when written; any known codec is read.

    budget_bytes: of all files together, see DiskBudget; None keeps every block
    policy:       which block has to go for another; LRU when None

    Deleting a file leaves it readable to those who have mapped it. With a budget a block that is handed out is in use
    until its tensors are gone, and is not evicted before.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        codec: Codec,
        budget_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        is_pinned: Callable[[str], bool] = never,
    ) -> None:
        super().__init__(root)
        self.codec = codec
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

    def put(self, key: str, block: KVBlock, *, encoded: bool = False, flushed: bool = False) -> KVBlock | None:
        """Written whole and flushed when this returns; None when the budget has no room for it.

        Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError; then nothing is left behind, and an earlier
        file of the key is still there, unless there is a budget.
        """
        path, budget, codec = self.path(key), self._budget, self.codec_for(block, encoded)
        if budget is None:
            return write_block(path, key, block, codec)
        claims: list[Claimed] = []

        def claim(file: BinaryIO, num_bytes: int) -> None:
            claims.append(budget.claim(Entry(key, num_bytes, block.num_tokens), file))

        try:
            written = write_block(path, key, block, codec, claim=claim)
        except NoRoomError:
            return None
        except BaseException:
            for claimed in claims:
                budget.give_back(claimed)
            raise
        budget.written(Entry(key, claims[0].num_bytes, block.num_tokens))
        return written

    def get(self, key: str) -> KVBlock | None:
        """Tensors alias the mapped file where the codec lets them. Raises DamagedBlockError, SchemaVersionError."""
        path = self.path(key)
        if self._budget is not None:
            return self._get_lent(path, key, self._budget)
        try:
            return read_block(path, key, self.codec.bases)
        except MissingBlockError:
            return None

    def verify(self, key: str) -> None:
        read_block(self.path(key), key, self.codec.bases)

    def delete(self, key: str) -> None:
        """Gone from the device too when this returns. Raises StoreReadOnlyError."""
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

    def prefetch(self, keys: Sequence[str]) -> None:
        """Have the kernel read all the files at once: the device then sees a deep queue instead of one page fault at a
        time."""
        if not hasattr(os, "posix_fadvise"):
            return
        for key in keys:
            with suppress(OSError):
                descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)

    def sweep(self, older_than_s: float) -> int:
        if self._budget is not None:
            return self._budget.sweep(older_than_s)
        leftovers = [path for path in self.paths() if is_leftover(path, older_than_s)]
        for path in leftovers:
            with translate_os_errors(path):
                path.unlink(missing_ok=True)
        return len(leftovers)

    def _get_lent(self, path: Path, key: str, budget: DiskBudget) -> KVBlock | None:
        release = budget.lend(key)
        if release is None:
            return None
        try:
            block = read_block(path, key, self.codec.bases)
        except MissingBlockError:
            release()
            budget.forget(key)
            return None
        except BaseException:
            release()
            raise
        self.mark_used(key, time.time())  # the order of use outlives the process, and other processes see it
        return leased(block, release)
