"""Files that appear whole or not at all.

A file is written under a temporary name in its own directory, flushed to the device, renamed, and the directory is
flushed: a kill or a power cut at any instant leaves the old file or the new one, and at worst a temporary file that
nobody reads. The temporary name carries the writer's process id, so that `sweep` can tell a leftover from a file that
is being written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import xxhash

from ragcache.errors import translate_os_errors

STORE_MARK = "ragcache.json"  # by which a directory is known as a store
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)-[0-9a-f]{8}\.tmp")
_DAY_S = 24 * 3600.0
PAGE = 4096


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """An unbuffered file that becomes `path` when the body ends without an error.

    The directory is made where it is absent. When anything fails, nothing is left behind.
    Raises StoreFullError, StoreReadOnlyError.
    """
    with translate_os_errors(path):
        make_directory(path.parent)
        temporary = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with open(temporary, "xb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        flush_directory(path.parent)


def write_all(file: BinaryIO, data: memoryview | bytes) -> None:
    """Write all of `data`: one write of an unbuffered file stops at 2 GiB, or where the device fills up."""
    view = memoryview(data)
    written = 0
    while written < view.nbytes:
        written += file.write(view.cast("B")[written:])


def read_at(descriptor: int, offset: int, num_bytes: int, into: memoryview, *, direct: bool = False) -> None:
    """Read so many bytes of a file; `into` may be longer. What is missing of a file that was cut stays as it was.

    direct: past the page cache, where memory, offset and length are multiples of PAGE. Raises OSError where the file
            system has no O_DIRECT
    """
    fcntl.fcntl(descriptor, fcntl.F_SETFL, getattr(os, "O_DIRECT", 0) if direct else 0)
    done = 0
    while done < num_bytes and (moved := os.preadv(descriptor, [into[done:]], offset + done)):
        done += moved


def is_cached(descriptor: int, num_bytes: int) -> bool:
    """Whether the page cache has a file, by its middle page: reading that alone makes the kernel read nothing ahead.
    True where the file system cannot say."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], num_bytes // 2, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    except OSError:
        return True


def file_digest(path: Path) -> bytes:
    """XXH3-128 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()


def make_directory(path: Path) -> None:
    """Make a directory and its parents so that they outlive a power cut."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Flush the entries of a directory (names, not contents) to the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def final_path(path: Path) -> Path | None:
    """Final name of a temporary file of `atomic_write`; None when `path` is none."""
    match = _TEMPORARY.fullmatch(path.name)
    return None if match is None else path.with_name(match["name"])


def is_leftover(path: Path, older_than_s: float) -> bool:
    """Whether `path` is a temporary file of `atomic_write` that nobody writes any more.

    That is: older than `older_than_s`, and its writer's process is gone. After a day the process id counts no longer:
    ids are given out again, and the writer may have been another machine's.
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
