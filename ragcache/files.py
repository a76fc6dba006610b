"""Files that are written whole or not at all.

A file is written under a temporary name in its own directory, flushed to the device and renamed; then the directory is
flushed. A kill or a power cut at any instant leaves the old file or the new file, and at worst a temporary file, which
is never read. The temporary name carries the writer's process id, so that `sweep` can distinguish a leftover from a
file that is being written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import xxhash

from ragcache.errors import translate_os_errors

STORE_MARK = "ragcache.json"  # marks a directory as a store
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)-[0-9a-f]{8}\.tmp")
_FLUSHED: set[Path] = set()  # directories whose names are known to be on the device
_DAY_S = 24 * 3600.0
PAGE = 4096
Rename = Callable[[Path, Path], None]


def cache_home() -> Path:
    """Return the directory for files that can be made again: $XDG_CACHE_HOME/ragcache, or ~/.cache/ragcache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return root / "ragcache"


@contextmanager
def atomic_write(path: Path, mode: int = 0o666, rename: Rename | None = None) -> Iterator[BinaryIO]:
    """Yield an unbuffered file that becomes `path` when the body ends without an error.

    mode:   the file's permissions, less the umask
    rename: called with the temporary and the final path to rename the file; None: `os.replace`

    The directory is created if it is missing. If anything fails, the temporary file is removed. Raises the errors of
    `translate_os_errors`.
    """
    with translate_os_errors(path):
        make_directory(path.parent)
        temporary = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with open(temporary, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
                os.fsync(file.fileno())
            (rename or os.replace)(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        flush_directory(path.parent)


def write_all(file: BinaryIO, data: memoryview | bytes) -> None:
    """Write all of `data`: a single write to an unbuffered file stops at 2 GiB, or when the device is full."""
    view = memoryview(data)
    written = 0
    while written < view.nbytes:
        written += file.write(view.cast("B")[written:])


def read_at(descriptor: int, offset: int, num_bytes: int, into: memoryview, *, direct: bool = False) -> None:
    """Read num_bytes of a file into `into`, which may be longer. If the file is shorter, the rest of `into` is
    unchanged.

    direct: bypass the page cache; address, offset and length must be multiples of PAGE. Raises OSError if the file
            system has no O_DIRECT
    """
    fcntl.fcntl(descriptor, fcntl.F_SETFL, getattr(os, "O_DIRECT", 0) if direct else 0)
    done = 0
    while done < num_bytes and (moved := os.preadv(descriptor, [into[done:]], offset + done)):
        done += moved


def is_cached(descriptor: int, num_bytes: int) -> bool:
    """Return whether the page cache holds a file, judged by its middle page: reading only that page triggers no
    read-ahead. Return True if the file system cannot tell."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], num_bytes // 2, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    except OSError:
        return True


def file_digest(path: Path) -> bytes:
    """Return the XXH3-128 digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()


def make_directory(path: Path) -> None:
    """Create a directory and its parents so that they survive a power cut.

    Directories that exist already are flushed too, once in each process: another process may have made them a moment
    ago.
    """
    if path in _FLUSHED and path.is_dir():
        return
    if path != path.parent:
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a directory above the store may belong to another user
            flush_directory(path.parent)
    _FLUSHED.add(path)


def flush_directory(path: Path) -> None:
    """Flush a directory's entries (names, not contents) to the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def final_path(path: Path) -> Path | None:
    """Return the final path of a temporary file of `atomic_write`, or None if `path` is not such a file."""
    match = _TEMPORARY.fullmatch(path.name)
    return None if match is None else path.with_name(match["name"])


def is_leftover(path: Path, older_than_s: float) -> bool:
    """Return whether `path` is a temporary file of `atomic_write` whose writer has stopped.

    A file is a leftover if it is older than `older_than_s` seconds and its writer's process has ended. A file that is
    older than a day is a leftover in any case: process ids are reused, and the writer may have run on another machine.
    """
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    return age_s >= _DAY_S or (age_s >= older_than_s and not _is_running(int(match["pid"])))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
