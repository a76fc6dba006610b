"""Opens a store's directory. No model is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ragcache.engine.options import StoreConfig
from ragcache.errors import StoreNotFoundError
from ragcache.seal import UNSEALED, Seal
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.folder import database_id, open_documents
from ragcache.store.kv_store import KVStore
from ragcache.store.remote import open_blobs
from ragcache.store.remote.connection import Connection, connect


class StoreParts(NamedTuple):
    """The opened parts of a store's directory."""

    layout: StoreLayout
    documents: DocumentStore
    kv: KVStore

    @property
    def rates(self) -> Path:
        """Return the path of the rates measured on this machine; see `RateFigures`."""
        return self.layout.root / "rates.json"

    def close(self) -> None:
        self.kv.close()
        self.documents.close()


def open_store(path: str | Path, config: StoreConfig, *, create: bool) -> StoreParts:
    """Open the parts of a store's directory.

    Raises StoreNotFoundError, StoreReadOnlyError, SchemaVersionError, SealError, DatabaseMismatchError, ConfigError,
    and StoreError if the remote refuses.
    """
    layout = StoreLayout(path)
    if config.remote is not None:  # refuse a wrong remote before creating a store
        open_blobs(config.remote).close()
    if create and not config.read_only:
        layout.create(encrypt=bool(config.encrypt))
    elif not layout.exists():
        raise StoreNotFoundError(f"{path}: no store here; ingest something to make one")
    seal = layout.seal(config.encrypt)
    with ExitStack() as undo:
        documents = open_documents(layout, config.database, read_only=config.read_only)
        undo.callback(documents.close)
        remote = _connect(documents, config, seal)
        if remote is not None:
            undo.callback(remote.close)
        foreign = open_foreign(layout.foreign, config, seal, layout.check)
        if foreign is not None:
            undo.callback(foreign.close)
        kv = open_kv(layout.kv, config, remote, documents.referenced, documents.basis, foreign, seal, layout.check)
        undo.pop_all()
    return StoreParts(layout, documents, kv)


def open_kv(
    root: Path,
    config: StoreConfig,
    remote: Connection | None = None,
    referenced: Callable[[Iterable[str]], set[str]] | None = None,
    basis: str | None = None,
    foreign: KVStore | None = None,
    seal: Seal = UNSEALED,
    alive: Callable[[], None] = lambda: None,
) -> KVStore:
    """Open a KV store with these settings. Raises ConfigError."""
    return KVStore(
        root,
        remote=remote,
        memory_bytes=config.memory_bytes,
        device_bytes=config.device_bytes,
        disk_bytes=config.disk_bytes,
        ttl_s=config.ttl_s,
        referenced=referenced,
        codec=config.codec,
        basis=basis,
        eviction=config.eviction,
        admission=config.admission,
        read_only=config.read_only,
        foreign=foreign,
        seal=seal,
        alive=alive,
    )


def open_foreign(
    root: Path, config: StoreConfig, seal: Seal = UNSEALED, alive: Callable[[], None] = lambda: None
) -> KVStore | None:
    """Open the KV store of blocks that belong to no document, or return None if its budget is 0.

    Its blocks are evicted as the store's other blocks are. It keeps blocks as they are, because the store's codec has
    already processed them.
    """
    if not config.foreign_cache:
        return None
    own = replace(config, memory_bytes=0, device_bytes=0, disk_bytes=config.foreign_cache, codec="raw", admission="all")
    return open_kv(root, own, seal=seal, alive=alive)


def open_kv_to_fill(
    root: Path, config: StoreConfig, seal: Seal, remote: str | None = None, owner: str = "", basis: str | None = None
) -> KVStore:
    """Open the store's KV in a process that only writes blocks: it keeps none in memory.

    remote: its URL, if the store has a remote; owner: id of the database that it belongs to; basis: see KVStore

    Raises the errors of `Connection.check`.
    """
    alone = replace(config, database=None, remote=None, memory_bytes=0, device_bytes=0)
    return open_kv(root, alone, None if remote is None else connect(remote, owner, seal), basis=basis, seal=seal)


def _connect(documents: DocumentStore, config: StoreConfig, seal: Seal) -> Connection | None:
    """Connect the requested remote, or the remote that the store was created with; return None without a remote.

    A store with a remote always connects it: otherwise the remote's blocks would outlive their documents. Only stores
    of the same database may share a remote, which records the database's id. Raises StoreMismatchError if the store's
    blocks are in another remote.
    """
    bound = documents.properties().get("remote")
    if config.remote is None and bound is None:
        return None
    url = config.remote or str(bound)
    with closing(open_blobs(url)) as named:
        if bound is not None:
            documents.bind("remote", named.where)
        connection = connect(url, database_id(documents), seal, read_only=config.read_only)
        try:
            documents.bind("remote", named.where)
        except BaseException:
            connection.close()
            raise
    return connection
