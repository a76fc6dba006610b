"""Uploaded files, saved until they are ingested."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from filelock import FileLock, Timeout

from ragcache.errors import ReaderError, translate_os_errors
from ragcache.ingest.readers import SourceFile, kind_problem
from ragcache.ingest.report import Failure

LOCK = ".lock"


class Upload(NamedTuple):
    """A file as uploaded: the name that the client gave it, and its bytes."""

    name: str
    file: BinaryIO


class UploadFolder:
    """A folder that holds uploads while they are read. Each server on a store has its own.

    It is deleted when the server stops, or, if the server was killed, when the next server starts: a server holds a
    lock as long as it runs. It is made at the first upload, so that a store that cannot be written to can be served.
    """

    def __init__(self, root: Path) -> None:
        """Set the folder's place. root: holds the folders of all servers, and nothing else"""
        self.root = root
        self._own: Path | None = None
        self._lock: FileLock | None = None

    def clean(self) -> None:
        """Delete folders of servers that no longer run."""
        if self.root.is_dir():
            with translate_os_errors(self.root), self._changing():
                for lock in self.root.glob(f"*{LOCK}"):
                    _delete_dead(lock)

    @contextmanager
    def holding(self, uploads: Sequence[Upload]) -> Iterator[tuple[list[SourceFile], list[Failure]]]:
        """Save uploads as files for the duration of the context, and yield them with failures for kinds that cannot be
        read.

        A file becomes the document that `ragcache ingest` would make: its id is its name, and its path is not stored.
        """
        with translate_os_errors(self.root):
            folder = Path(tempfile.mkdtemp(dir=self._folder()))
            try:
                saved = [_save(upload, Path(folder, str(rank))) for rank, upload in enumerate(uploads)]
                files = [item for item in saved if isinstance(item, SourceFile)]
                failures = [item for item in saved if isinstance(item, Failure)]
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        try:
            yield files, failures
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete this server's folder."""
        if self._own is not None and self._lock is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
            self._own = self._lock = None

    def _folder(self) -> Path:
        if self._own is None:
            self.root.mkdir(exist_ok=True, mode=0o700)
            with self._changing():
                self._own = Path(tempfile.mkdtemp(dir=self.root))
                self._lock = FileLock(f"{self._own}{LOCK}", thread_local=False)
                self._lock.acquire(timeout=0)
        return self._own

    def _changing(self) -> FileLock:
        """Return the lock held while a folder is made or folders are deleted, so that a folder not yet locked is not
        taken for a dead server's.
        """
        return FileLock(self.root.with_name(f"{self.root.name}{LOCK}"), timeout=30)


def _delete_dead(path: Path) -> None:
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:  # its server still runs
        return
    shutil.rmtree(path.with_name(path.name.removesuffix(LOCK)), ignore_errors=True)
    path.unlink(missing_ok=True)
    lock.release()


def _save(upload: Upload, place: Path) -> SourceFile | Failure:
    name = plain_name(upload.name)
    suffix = PurePosixPath(name).suffix.lower()
    if problem := kind_problem(suffix):
        return Failure(name, ReaderError(name, problem))
    path = place.with_suffix(suffix)
    with open(path, "wb") as file:
        shutil.copyfileobj(upload.file, file)
    return SourceFile(path, name, name)


def plain_name(filename: str) -> str:
    """Return a relative path with forward slashes and no "..": an id, never a path on this machine."""
    parts = [part for part in filename.replace("\\", "/").replace("\0", "").split("/") if part not in ("", ".", "..")]
    name = "/".join(parts)[-512:]
    return name.encode("utf-8", "backslashreplace").decode("utf-8") or "unnamed"
