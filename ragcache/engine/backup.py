"""Backups of a store: a copy of its directory, taken while it is served, with a manifest of its files.

The database and the index are copied while no writer runs, so they agree with each other. Blocks are copied afterwards:
a block that a writer deletes meanwhile is computed again at its first use after a restore, and a block that a writer
adds is referred to by nothing, which `ragcache doctor` collects.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ragcache import errors
from ragcache.engine.store import Store
from ragcache.files import file_digest, final_path, flush_directory, make_directory, write_all
from ragcache.store.directory import FORMAT_VERSION
from ragcache.store.schema import SCHEMA_VERSION

MANIFEST = "backup.json"
VERSIONS = {"backup": 1, "store": FORMAT_VERSION, "schema": SCHEMA_VERSION}
# Files of running servers, which no backup holds.
LEFT_OUT = ("server.json", "server.lock", "writer.lock", "uploads.lock", "uploads")
# Directories of blocks. The manifest has no digests of blocks, because each block carries a checksum. Blocks may come
# and go while they are copied.
BLOCKS = ("kv", "foreign")


class Backup(NamedTuple):
    """A backup that was taken, or a store that was restored from a backup.

    path:     its directory
    files:    number of its files
    bytes:    size of its files together
    database: where the documents are, if they are not in the directory
    """

    path: str
    files: int
    bytes: int
    database: str | None


def back_up(store: Store, target: Path, *, timeout_s: float = 30.0) -> Backup:
    """Copy an open store to `target`, a new or empty directory, which appears whole or not at all.

    Documents in PostgreSQL are left to its own tools, and the index is left out with them: it is made again from the
    documents.

    Raises StoreBusyError (another writer, or another backup to this directory), StoreNotFoundError (`target` holds
    files), StoreFullError, StoreReadOnlyError.
    """
    layout, documents = store.store.layout, store.store.documents
    is_inside = documents.database.dialect == "sqlite"
    with _whole(target) as partial:
        with layout.writer(timeout_s):
            if is_inside:
                with (
                    closing(sqlite3.connect(f"{layout.database.absolute().as_uri()}?mode=ro", uri=True)) as source,
                    closing(sqlite3.connect(partial / layout.database.name)) as copy,
                ):
                    source.backup(copy)
            for path in _files(layout.root, layout.database.name):
                if path.parts[0] not in BLOCKS and (is_inside or not path.name.startswith(layout.index.name)):
                    _copy(layout.root / path, partial / path)
        for path in _files(layout.root, layout.database.name):
            if path.parts[0] in BLOCKS:
                with suppress(FileNotFoundError):  # a writer has deleted the block
                    _copy(layout.root / path, partial / path)
        files = {str(path): _described(partial, path) for path in _files(partial)}
        noted = layout.documents_in()
        where = None if is_inside or noted is None else noted.where
        with open(partial / MANIFEST, "wb", buffering=0) as file:
            write_all(file, json.dumps({**VERSIONS, "database": where, "files": files}).encode())
            os.fsync(file.fileno())
    return Backup(str(target), len(files), sum(size for size, _ in files.values()), where)


def restore(backup: Path, root: Path) -> Backup:
    """Make a store of a backup in `root`, a new or empty directory, which appears whole or not at all.

    Raises StoreNotFoundError (no backup, half a backup, or `root` holds files), SchemaVersionError (of another
    version), StoreError (files are missing or damaged), StoreBusyError, StoreFullError, StoreReadOnlyError.
    """
    manifest = _manifest(backup)
    files: dict[str, list[Any]] = manifest["files"]
    with _whole(root) as partial:
        for name, described in files.items():
            path = Path(name)
            if path.is_absolute() or ".." in path.parts or not (backup / path).is_file():
                raise errors.StoreError(f"{backup}: {name} is missing; take another backup")
            _copy(backup / path, partial / path)
            if list(_described(partial, path)) != described:
                raise errors.StoreError(f"{backup}: {name} is damaged; take another backup")
    return Backup(str(root), len(files), sum(int(size) for size, _ in files.values()), manifest["database"])


def _manifest(backup: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((backup / MANIFEST).read_bytes())
        versions = {name: manifest[name] for name in VERSIONS}
        errors.check_type("files", manifest["files"], dict, "take another backup")
        manifest["database"]
    except OSError as error:
        raise errors.StoreNotFoundError(
            f"{backup}: no whole backup ({MANIFEST}: {error.strerror}); name the directory of `ragcache backup`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise errors.StoreError(f"{backup / MANIFEST}: damaged; take another backup") from error
    if versions != VERSIONS:
        raise errors.SchemaVersionError(
            f"{backup}: a backup of other versions ({versions}); this version of ragcache reads {VERSIONS}: use the "
            "version that made it"
        )
    return manifest


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield a directory that becomes `target` when the body ends without an error.

    A killed process leaves the directory under another name, and the next call deletes it. Raises StoreNotFoundError if
    `target` holds files, StoreBusyError if another process writes it.
    """
    partial = target.with_name(f".{target.name}.partial")
    with errors.translate_os_errors(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise errors.StoreNotFoundError(f"{target}: it is not empty; name a new directory, or move it away")
        make_directory(target.parent)
        lock = FileLock(target.with_name(f".{target.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise errors.StoreBusyError(
                f"{target}: another process writes it; wait for it, or name another one"
            ) from error
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            yield partial
            for folder, _, _ in os.walk(partial):
                flush_directory(Path(folder))
            os.replace(partial, target)  # onto an empty directory at most
            flush_directory(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def _files(root: Path, database: str | None = None) -> Iterator[Path]:
    """Yield a store's files, relative to its root, without those of running processes and of the database."""
    for folder, folders, names in os.walk(root):
        at = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if at.parts or name not in LEFT_OUT]
        for name in names:
            left_out = not at.parts and (name in LEFT_OUT or (database and name.startswith(database)))
            if not left_out and final_path(Path(name)) is None:
                yield at / name


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def _described(root: Path, path: Path) -> tuple[int, str]:
    """Return a file's size, and its digest unless it is a block."""
    digest = "" if path.parts[0] in BLOCKS else file_digest(root / path).hex()
    return (root / path).stat().st_size, digest
