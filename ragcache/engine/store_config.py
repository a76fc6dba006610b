"""A store's directory, opened. No model is needed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ragcache.engine.rates import AUTO, LOADS
from ragcache.errors import ConfigError, StoreNotFoundError, check_choice
from ragcache.kv.block_key import Recipe
from ragcache.store.codec_basis import known_basis
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.folder import database_id, open_documents
from ragcache.store.foreign import DEFAULT_FOREIGN_BYTES, ForeignCache
from ragcache.store.kv_store import DEFAULT_MEMORY_BYTES, KVStore
from ragcache.store.neighbours import NEIGHBOURS_FROM
from ragcache.store.remote import Connection, connect, open_blobs

DEFAULT_PREFIX_BYTES = 512 << 20
DEFAULT_SPECULATIVE_BYTES = 256 << 20


@dataclass(frozen=True)
class StoreConfig:
    """How a store is opened.

    database:     SQLAlchemy URL; SQLite inside the store's directory when None. The directory names the database that
                  has its documents, and another one is refused
    memory_bytes: budget of the host-memory tier
    codec, eviction, admission, trace: see KVStore
    index:        "flat" (exact), "hnsw", "ivfpq" (many vectors), or "pgvector" (in the PostgreSQL database)
    read_only:    nothing is written, not even computed blocks
    prefix_bytes: budget of KV on the model's device that stays for later questions: exact KV of prompts, answers and
                  system prompts, and placed contexts; 0: nothing is kept, each question reads its prefix
    answer_bytes: KV that all answers in progress may hold together; None: half of the memory of the model's device
    load:         "auto": of loading a block and computing it the faster one, by measured rates; "always" load what a
                  tier has; "never": compute all that is not in memory
    speculative_bytes: of blocks that may be read while retrieval still ranks, held or on their way; 0 reads none
    device_bytes, disk_bytes, write_behind_bytes, ttl_s: see KVStore
    remote:       URL of a remote that several machines share, such as s3://bucket/prefix or redis://host:6379/0: blocks
                  are kept there, and copies on this machine's disk, within disk_bytes
    neighbours:   how many other chunks of the store each chunk is encoded behind (see `Recipe`); None: as the store was
                  made, none for a new one
    neighbours_from: "similarity": the chunks nearest to it; "document": those right before it in its document; None:
                  as the store was made, similarity for a new one
    kv, hot_after: what `ingest` does where it is not told otherwise, see `Ingestor.ingest`
    foreign_cache: budget on disk of KV that belongs to no document: passages that callers hand over; 0 keeps none
    measure_s:    seconds to spend on measuring this machine at the first opening with a model; later openings measure
                  the disk alone, in a third of them; 0 measures nothing
    """

    database: str | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    codec: str = "raw"
    eviction: str = "lru"
    index: str = "flat"
    read_only: bool = False
    admission: str = "all"
    trace: str | Path | None = None
    prefix_bytes: int = DEFAULT_PREFIX_BYTES
    answer_bytes: int | None = None
    load: str = AUTO
    speculative_bytes: int = DEFAULT_SPECULATIVE_BYTES
    measure_s: float = 0.25
    device_bytes: int = 0
    disk_bytes: int | None = None
    write_behind_bytes: int = 0
    ttl_s: float | None = None
    remote: str | None = field(default=None, repr=False)  # it may hold a password
    kv: str = "eager"
    hot_after: int = 2
    foreign_cache: int = DEFAULT_FOREIGN_BYTES
    neighbours: int | None = None
    neighbours_from: str | None = None

    def __post_init__(self) -> None:
        if self.answer_bytes is not None and self.answer_bytes < 1:
            raise ConfigError(f"answer_bytes is {self.answer_bytes}; it must be at least 1, or None for a default")
        if self.foreign_cache < 0:
            raise ConfigError(f"foreign_cache is {self.foreign_cache}; give bytes, or 0 to keep none", "foreign_cache")
        if self.load not in LOADS:
            raise ConfigError(f"load {self.load!r} is unknown; choose one of {', '.join(LOADS)}")
        if self.speculative_bytes < 0 or not self.measure_s >= 0:
            raise ConfigError(
                f"speculative_bytes is {self.speculative_bytes} and measure_s {self.measure_s}; give 0 (none) or more"
            )
        if self.neighbours is not None:
            Recipe(neighbours=self.neighbours)  # refuses what is no number of chunks
        if self.neighbours_from is not None:
            check_choice("neighbours_from", self.neighbours_from, NEIGHBOURS_FROM)


class Store(NamedTuple):
    """The parts of one directory, opened."""

    layout: StoreLayout
    documents: DocumentStore
    kv: KVStore

    @property
    def rates(self) -> Path:
        """The file of the rates measured on this machine; see `RateFigures`."""
        return self.layout.root / "rates.json"

    def close(self) -> None:
        self.kv.close()
        self.documents.close()


def open_store(path: str | Path, config: StoreConfig, *, create: bool) -> Store:
    """Raises StoreNotFoundError, StoreReadOnlyError, SchemaVersionError, DatabaseMismatchError, ConfigError, and
    StoreError where the remote refuses."""
    layout = StoreLayout(path)
    if config.remote is not None:  # a wrong one is refused before a store is made
        open_blobs(config.remote).close()
    if create and not config.read_only:
        layout.create()
    elif not layout.exists():
        raise StoreNotFoundError(f"{path}: no store here; ingest something to make one")
    layout.check()
    with ExitStack() as undo:
        documents = open_documents(layout, config.database, read_only=config.read_only)
        undo.callback(documents.close)
        remote = _connect(documents, config)
        if remote is not None:
            undo.callback(remote.close)
        foreign = open_foreign(layout.foreign, config)
        if foreign is not None:
            undo.callback(foreign.close)
        kv = open_kv(layout.kv, config, remote, documents.referenced, known_basis(documents), foreign)
        undo.pop_all()
    return Store(layout, documents, kv)


def open_kv(
    root: Path,
    config: StoreConfig,
    remote: Connection | None = None,
    referenced: Callable[[Iterable[str]], set[str]] | None = None,
    basis: str | None = None,
    foreign: ForeignCache | None = None,
) -> KVStore:
    """Raises ConfigError."""
    return KVStore(
        root,
        remote=remote,
        memory_bytes=config.memory_bytes,
        device_bytes=config.device_bytes,
        disk_bytes=config.disk_bytes,
        write_behind_bytes=config.write_behind_bytes,
        ttl_s=config.ttl_s,
        referenced=referenced,
        codec=config.codec,
        basis=basis,
        eviction=config.eviction,
        admission=config.admission,
        trace=config.trace,
        read_only=config.read_only,
        foreign=foreign,
    )


def open_foreign(root: Path, config: StoreConfig) -> ForeignCache | None:
    """Blocks of no document, evicted as others are; None where none are kept. Without a codec: what is kept is what
    the store's codec left of a block."""
    if not config.foreign_cache:
        return None
    kv = KVStore(
        root,
        memory_bytes=0,
        disk_bytes=config.foreign_cache,
        ttl_s=config.ttl_s,
        eviction=config.eviction,
        read_only=config.read_only,
    )
    return ForeignCache(kv)


def open_kv_to_fill(
    root: Path, config: StoreConfig, remote: str | None = None, owner: str = "", basis: str | None = None
) -> KVStore:
    """The store's KV in a process that only writes blocks: it keeps none in memory, and traces nothing.

    remote: its URL, where the store has one; owner: id of the database that it belongs to; basis: see KVStore

    Raises as `Connection.check` does.
    """
    alone = replace(
        config, database=None, remote=None, memory_bytes=0, device_bytes=0, write_behind_bytes=0, trace=None
    )
    return open_kv(root, alone, None if remote is None else connect(remote, owner), basis=basis)


def _connect(documents: DocumentStore, config: StoreConfig) -> Connection | None:
    """The remote asked for, or the one that the store was made with: its blocks would outlive their documents else.

    It may be shared by the stores of one database alone, whose id is in the remote.
    Raises StoreMismatchError when the store's blocks are in another one.
    """
    bound = documents.properties().get("remote")
    if config.remote is None and bound is None:
        return None
    url = config.remote or str(bound)
    with closing(open_blobs(url)) as named:
        if bound is not None:
            documents.bind("remote", named.where)
        connection = connect(url, database_id(documents), read_only=config.read_only)
        try:
            documents.bind("remote", named.where)
        except BaseException:
            connection.close()
            raise
    return connection
