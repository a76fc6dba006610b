"""Names of the files that hold blocks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ragcache.errors import ConfigError
from ragcache.files import final_path

SUFFIX = ".safetensors"
_KEY = re.compile(r"[0-9a-f]{64}")


def check_key(key: str) -> None:
    """Raise ConfigError if the key is not a block key, so that no external name becomes a path."""
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{key!r} is no block key: 64 hex digits are")


class BlockFile(NamedTuple):
    """A file below the root. key: None if the file is not a block, such as a temporary file. used_at: the file's own
    modification time, in Unix seconds."""

    path: Path
    key: str | None
    num_bytes: int
    used_at: float


class BlockFiles:
    """Files root/aa/bb/<key>.safetensors, where aabb are the key's first digits (some file systems are slow with many
    names in one directory)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        """Return the path of the block's file, which need not exist. Raises ConfigError if the key is not a block
        key."""
        check_key(key)
        return self.root / key[:2] / key[2:4] / f"{key}{SUFFIX}"

    def paths(self) -> Iterator[Path]:
        """Yield all files, whether or not they are blocks; they may vanish meanwhile."""
        return (path for directory in self._directories() for path in _sorted_entries(directory))

    def keys(self) -> Iterator[str]:
        return (key for path in self.paths() if (key := self.key_of(path)) is not None)

    def walk(self) -> Iterator[BlockFile]:
        """Yield all files with their present sizes. A file renamed meanwhile is not missed, but may come twice."""
        for directory in self._directories():
            targets = {path: final_path(path) for path in _sorted_entries(directory)}
            for path, target in targets.items():
                if target is not None and (file := self._look(path)) is not None:
                    yield file
            # After the temporary files: a file that was temporary when listed may have its final name by now.
            for path in sorted({target or path for path, target in targets.items()}):
                if (file := self._look(path)) is not None:
                    yield file

    def _directories(self) -> Iterator[Path]:
        return (directory for shard in _sorted_entries(self.root) for directory in _sorted_entries(shard))

    def _look(self, path: Path) -> BlockFile | None:
        status = _status(path)
        return None if status is None else BlockFile(path, self.key_of(path), status.st_size, status.st_mtime)

    def key_of(self, path: Path) -> str | None:
        is_block = path.suffix == SUFFIX and bool(_KEY.fullmatch(path.stem)) and path == self.path(path.stem)
        return path.stem if is_block else None

    def size(self, key: str) -> int | None:
        status = _status(self.path(key))
        return None if status is None else status.st_size

    def used_at(self, key: str) -> float | None:
        """Return the Unix time in seconds at which the block was last marked as used."""
        status = _status(self.path(key))
        return None if status is None else status.st_mtime

    def mark_used(self, key: str, at: float) -> None:
        """Set the file's time. Do nothing if the file is missing or cannot be changed: only the order of use is
        lost."""
        with suppress(OSError):
            os.utime(self.path(key), (at, at))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _sorted_entries(directory: Path) -> list[Path]:
    """Return a directory's entries by name; an empty list if the directory is missing (it may vanish while others
    write)."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
