"""The store's blocks, as vLLM's processes read them."""

from __future__ import annotations

import os
from pathlib import Path

from ragcache.errors import MissingBlockError, StoreReadOnlyError
from ragcache.kv.block import KVBlock
from ragcache.store.directory import StoreLayout
from ragcache.store.kv_store import KVStore
from ragcache.store.remote.connection import connect
from ragcache.store.tiers.block_names import BlockFiles

REMOTE_VARIABLE = "RAGCACHE_REMOTE"
"""The remote's URL with credentials, if any: a connector's configuration is shown in logs."""
MOST_KNOWN = 1 << 16
"""Number of files remembered as verified, at about 300 bytes each."""


def refuse_unwritable(layout: StoreLayout) -> None:
    """Raise StoreReadOnlyError if this process may not keep copies of a remote's blocks in the store's directory."""
    where = layout.kv if layout.kv.exists() else layout.root
    if not os.access(where, os.W_OK):
        raise StoreReadOnlyError(
            f"{where}: this user may not write here, where copies of the remote's blocks are kept; start vLLM as the "
            "user that owns the folder, or with another --store and the same --database"
        )


class StoredBlocks:
    """The blocks in a store's directory. With a remote, the directory holds copies of the remote's blocks.

    root:       the store's directory
    remote:     URL of the remote; "": none
    owner:      id of the database that the remote belongs to
    disk_bytes: budget of the copies; None: unlimited

    Raises SchemaVersionError, SealError, StoreNotFoundError, ConfigError, and with a remote StoreReadOnlyError.
    """

    def __init__(self, root: str | Path, remote: str = "", owner: str = "", disk_bytes: int | None = None) -> None:
        layout = StoreLayout(root)
        seal = layout.seal()
        self._has_remote = bool(remote)
        self._files = BlockFiles(layout.kv)
        self._verified: dict[str, tuple[int, ...]] = {}
        if not remote:
            self._kv = KVStore(layout.kv, memory_bytes=0, read_only=True, seal=seal)
            return
        refuse_unwritable(layout)
        connection = connect(os.environ.get(REMOTE_VARIABLE) or remote, owner, seal, read_only=True)
        self._kv = KVStore(layout.kv, memory_bytes=0, disk_bytes=disk_bytes, remote=connection, seal=seal)

    def verify(self, key: str) -> None:
        """Check that `get` can return a block, and copy a remote block to this machine.

        A file is read once, and again if it has changed. Damage that does not change the file's status is found by
        `get`, which checks every block it reads.

        Raises MissingBlockError, DamagedBlockError, SchemaVersionError.
        """
        status = self._status(key)
        if status is not None and self._verified.get(key) == status:
            return
        if not self._has_remote:
            self._kv.verify(key)
        elif self._kv.get(key) is None:
            raise MissingBlockError(f"{self._kv.root}: no block {key} here or in the remote")
        if len(self._verified) >= MOST_KNOWN:
            self._verified.clear()
        if status is not None:
            self._verified[key] = status

    def get(self, key: str) -> KVBlock | None:
        found = self._kv.get(key)
        return None if found is None else found.block

    def close(self) -> None:
        self._kv.close()

    def _status(self, key: str) -> tuple[int, ...] | None:
        """Return values that change with a block's file; None if there is no file."""
        try:
            found = self._files.path(key).stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
