"""The files of a store directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ragcache.codecs.atomic import atomic_write, write_all
from ragcache.errors import SchemaVersionError, StoreBusyError, StoreError, StoreNotFoundError, translate_os_errors
from ragcache.forks import Home

FORMAT_VERSION = 1


class StoreLayout:
    """Paths below a store's root:

    ragcache.json   says that the directory is a store, and of which format
    store.sqlite3   documents (unless they are in PostgreSQL)
    kv/             blocks
    index.faiss*    the vector index, derived from the documents
    writer.lock     held while a process changes the store
    uploads/        files on their way in, a folder for each server
    models/         an adapter and its base as one checkpoint, for vLLM
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.marker = self.root / "ragcache.json"
        self.database = self.root / "store.sqlite3"
        self.kv = self.root / "kv"
        self.index = self.root / "index.faiss"
        self.models = self.root / "models"
        self.lock = self.root / "writer.lock"
        self.home = Home(f"{self.root}: this store was opened", "open it")
        self._lock = FileLock(self.lock, thread_local=True)

    def exists(self) -> bool:
        """Whether there is a store, of whatever format."""
        return self.marker.is_file()

    def create(self) -> None:
        """Make the directory a store, if it is none. Raises StoreNotFoundError when it holds other things,
        SchemaVersionError, StoreReadOnlyError, StoreFullError."""
        if not self.exists():
            with translate_os_errors(self.root):
                taken = self.root.exists() and (not self.root.is_dir() or any(self._foreign_entries()))
                # Looked for again: another process may have made a store of it meanwhile, the marker before all else.
                if taken and not self.exists():
                    raise StoreNotFoundError(f"{self.root}: neither a store nor an empty directory; name another one")
                if not taken:
                    self._write_marker()
                    return
        self.check()

    def check(self) -> None:
        """Raises StoreNotFoundError when there is no store, SchemaVersionError when this version cannot read it."""
        try:
            marker = json.loads(self.marker.read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreNotFoundError(f"{self.root}: no store here; ingest something to make one") from error
        except OSError as error:
            raise StoreError(f"{self.marker}: cannot be read ({error.strerror}); check its permissions") from error
        except ValueError as error:
            raise SchemaVersionError(f"{self.marker}: not a store ({error}); name another directory") from error
        version = marker.get("format") if isinstance(marker, dict) else None
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise SchemaVersionError(
                f"{self.root}: store format {version!r}; this version of ragcache reads up to {FORMAT_VERSION}: "
                "use the version that made it, or a later one"
            )

    @contextmanager
    def writer(self, timeout_s: float = 30.0) -> Iterator[None]:
        """Hold the store's writer lock against other processes and threads; a killed holder's lock is free.

        The same thread may hold it twice. Raises StoreBusyError, StoreReadOnlyError, ForkedError.
        """
        self.home.check()
        with translate_os_errors(self.lock):
            try:
                self._lock.acquire(timeout=max(0.0, timeout_s))
            except Timeout as error:
                raise StoreBusyError(
                    f"{self.root}: another process or thread is writing to this store; wait for it and run again"
                ) from error
        try:
            yield
        finally:
            self._lock.release()

    def _write_marker(self) -> None:
        with atomic_write(self.marker) as file:
            write_all(file, json.dumps({"format": FORMAT_VERSION, "made_by": "ragcache"}).encode() + b"\n")

    def _foreign_entries(self) -> Iterator[Path]:
        """Entries of the directory that no killed `create` left."""
        own = (self.lock.name, f".{self.marker.name}.")
        return (path for path in self.root.iterdir() if not path.name.startswith(own))
