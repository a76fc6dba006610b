"""The files of a store directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ragcache import errors
from ragcache.files import STORE_MARK, atomic_write, make_directory, write_all
from ragcache.forks import Home
from ragcache.seal import VARIABLE, Seal, new_secret, open_seal, write_key
from ragcache.store.tiers.block_names import BlockFiles

FORMAT_VERSION = 1


class NamedDatabase(NamedTuple):
    """The database that has a store's documents.

    where: its address without a password (`database.address`), or the file's name if it is in the store's directory
    id:    random and kept in the database: it moves with the database, and differs between databases
    """

    where: str
    id: str


class StoreLayout:
    """Paths below a store's root:

    ragcache.json   says that the directory is a store, of which format and seal, and which database has its documents
    ragcache.key    the secret that seals blocks and index, unless it is in the environment
    store.sqlite3   documents (unless they are in PostgreSQL)
    kv/             blocks
    index.faiss*    the vector index, derived from the documents
    foreign/        blocks of passages that belong to no document, and a list of these passages
    passages.npz    the index of passages in prompts, derived from the documents
    writer.lock     held while a process changes the store
    server.json     where a server over the store listens; server.lock is held while it runs
    uploads/        files that are being uploaded, in a folder for each server
    models/         an adapter and its base as one checkpoint, for vLLM
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.marker = self.root / STORE_MARK
        self.key = self.root / "ragcache.key"
        self.database = self.root / "store.sqlite3"
        self.kv = self.root / "kv"
        self.index = self.root / "index.faiss"
        self.foreign = self.root / "foreign"
        self.passages = self.root / "passages.npz"
        self.models = self.root / "models"
        self.lock = self.root / "writer.lock"
        self.home = Home(f"{self.root}: this store was opened", "open it")
        self._lock = FileLock(self.lock, thread_local=True)

    def exists(self) -> bool:
        """Return whether the directory holds a store, of any format."""
        return self.marker.is_file()

    def create(self, *, encrypt: bool = False) -> None:
        """Create a store in the directory, unless it holds one. Raises StoreNotFoundError if the directory holds other
        files, SchemaVersionError, SealError, StoreReadOnlyError, StoreFullError.

        encrypt: whether a new store encrypts its blocks and its index
        """
        if not self.exists():
            with errors.translate_os_errors(self.root):
                taken = self.root.exists() and (not self.root.is_dir() or any(self._foreign_entries()))
                # Check again: another process may have created a store here meanwhile; it writes the marker first.
                if taken and not self.exists():
                    raise errors.StoreNotFoundError(
                        f"{self.root}: neither a store nor an empty directory; name another one"
                    )
                if not taken:
                    make_directory(self.root)
                    with self._locked(30.0):
                        self._create(encrypt)
        self.check()

    def check(self) -> None:
        """Raise StoreNotFoundError if there is no store, SchemaVersionError if this version cannot read it."""
        self._read_marker()

    def _create(self, encrypt: bool) -> None:
        if self.exists():  # another process was faster
            return
        if VARIABLE not in os.environ and not self.key.exists():
            write_key(self.key, [new_secret()])
        seal = open_seal(self.key)
        self._write_marker({"format": FORMAT_VERSION, "made_by": "ragcache", "seal": seal.id, "encrypt": encrypt})

    def seal(self, encrypt: bool | None = None) -> Seal:
        """Return the store's seal.

        encrypt: whether the caller expects the store to encrypt; None: either

        Raises SealError if the secret is missing or is not the store's, ConfigError if the store does not encrypt as
        `encrypt` states, and the errors of `check`.
        """
        marker = self._read_marker()
        encrypts = bool(marker.get("encrypt"))
        if encrypt not in (None, encrypts):
            raise errors.ConfigError(
                f"{self.root}: {'is' if encrypts else 'is not'} encrypted; `ragcache reencrypt` changes that", "encrypt"
            )
        seal = open_seal(self.key, encrypts=encrypts)
        if marker.get("seal") not in seal.known:
            raise errors.SealError(
                f"{self.root}: sealed with the key {marker.get('seal')}, not with {seal.id} of {seal.file or VARIABLE}"
                f"; restore {self.key.name} from a copy, or set {VARIABLE}. Where the key is lost, `ragcache reencrypt "
                "--lost` makes another, and KV is computed again"
            )
        return seal

    def rotate(self, encrypt: bool | None, *, lost: bool = False) -> None:
        """Seal with a new secret from now on. Files sealed with earlier secrets can be read until `forget_old`.

        encrypt: whether the store encrypts from now on; None: as before
        lost:    whether the old secret is lost, so that it is left out of the key file

        The caller holds the writer lock. Raises ConfigError if the environment holds the secret alone.
        """
        marker = self._read_marker()
        encrypts = bool(marker.get("encrypt")) if encrypt is None else encrypt
        if VARIABLE in os.environ:
            seal = open_seal(self.key)
            if not lost and encrypts == bool(marker.get("encrypt")) and next(reversed(seal.known)) == seal.id:
                raise errors.ConfigError(
                    f"write a new key before the old: {VARIABLE}=NEW,OLD, NEW from `openssl rand -hex 32`"
                )
        else:
            write_key(self.key, [new_secret(), *([] if lost else self.seal().known.values())])
            seal = open_seal(self.key)
        self._write_marker({**marker, "seal": seal.id, "encrypt": encrypts})

    def forget_old(self) -> None:
        """Remove all secrets but the present one from the key file. The caller holds the writer lock.

        Secrets in the environment are left as they are.
        """
        if VARIABLE not in os.environ:
            write_key(self.key, [next(iter(self.seal().known.values()))])

    def documents_in(self) -> NamedDatabase | None:
        """Return the database that has the documents, or None if it is not recorded yet. Raises the same errors as
        `check`."""
        noted = self._read_marker().get("documents")
        return None if noted is None else NamedDatabase(str(noted["where"]), str(noted["id"]))

    def note_documents(self, database: NamedDatabase) -> None:
        """Record which database has the documents; the caller holds the writer lock. Raises StoreReadOnlyError,
        StoreFullError."""
        self._write_marker({**self._read_marker(), "documents": database._asdict()})

    def has_content(self) -> bool:
        """Return whether the directory holds an index or a block."""
        return self.index.exists() or any(BlockFiles(self.kv).keys())

    def _read_marker(self) -> dict[str, Any]:
        try:
            marker: dict[str, Any] = json.loads(self.marker.read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise errors.StoreNotFoundError(f"{self.root}: no store here; ingest something to make one") from error
        except OSError as error:
            raise errors.StoreError(
                f"{self.marker}: cannot be read ({error.strerror}); check its permissions"
            ) from error
        except ValueError as error:
            raise errors.SchemaVersionError(f"{self.marker}: not a store ({error}); name another directory") from error
        version = marker.get("format") if isinstance(marker, dict) else None
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise errors.SchemaVersionError(
                f"{self.root}: store format {version!r}; this version of ragcache reads up to {FORMAT_VERSION}: "
                "use the version that made it, or a later one"
            )
        noted = marker.get("documents")
        if noted is not None and not (isinstance(noted, dict) and {"where", "id"} <= noted.keys()):
            raise errors.StoreError(f'{self.marker}: damaged at "documents"; restore it from a copy, or ingest again')
        return marker

    @contextmanager
    def writer(self, timeout_s: float = 30.0) -> Iterator[None]:
        """Hold the store's writer lock against other processes and threads. If its holder is killed, the lock is free.

        The same thread may hold it twice. Raises StoreNotFoundError if the directory was removed, StoreBusyError,
        StoreReadOnlyError, ForkedError.
        """
        self.home.check()
        self.check()  # acquiring the lock would create a removed directory again
        with self._locked(timeout_s):
            self.check()
            yield

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        with errors.translate_os_errors(self.lock):
            try:
                self._lock.acquire(timeout=max(0.0, timeout_s))
            except Timeout as error:
                raise errors.StoreBusyError(
                    f"{self.root}: another process or thread is writing to this store; wait for it and run again"
                ) from error
        try:
            yield
        finally:
            self._lock.release()

    def _write_marker(self, marker: dict[str, Any]) -> None:
        with atomic_write(self.marker) as file:
            write_all(file, json.dumps(marker).encode() + b"\n")

    def _foreign_entries(self) -> Iterator[Path]:
        """Yield the directory's entries, except those left by a killed `create`."""
        own = (self.lock.name, self.key.name, f".{self.key.name}.", f".{self.marker.name}.")
        return (path for path in self.root.iterdir() if not path.name.startswith(own))
