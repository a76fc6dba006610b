"""Blocks that no tier may evict."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

from ragcache.errors import translate_os_errors
from ragcache.files import atomic_write, make_directory, write_all

log = logging.getLogger(__name__)


class Pins:
    """Pinned keys in a file beside the blocks, shared by all processes: `reload` reads other processes' changes."""

    def __init__(self, root: Path) -> None:
        self._path = root / ".pins.json"
        self._lock = FileLock(root / ".pins.lock")
        self.keys: frozenset[str] = frozenset()
        self._version: tuple[int, int] | None = None
        self.reload()

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def __len__(self) -> int:
        return len(self.keys)

    def reload(self) -> None:
        """Read the file if it has changed."""
        try:
            status = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self.keys, self._version = frozenset(), None
            return
        version = (status.st_mtime_ns, status.st_ino)
        if version != self._version:
            self.keys, self._version = self._read(), version

    def add(self, keys: Iterable[str], allowed: Callable[[frozenset[str]], None]) -> None:
        """Pin these keys too. allowed: called with all pins including the new ones; if it raises, nothing is pinned

        Raises StoreReadOnlyError, StoreFullError.
        """
        added = frozenset(keys)

        def change(pinned: frozenset[str]) -> frozenset[str]:
            if not added <= pinned:
                allowed(pinned | added)
            return pinned | added

        self._change(change)

    def remove(self, keys: Iterable[str]) -> None:
        """Unpin these keys; keys that are not pinned are ignored. Raises StoreReadOnlyError, StoreFullError."""
        removed = frozenset(keys)
        if removed & self.keys:
            self._change(lambda pinned: pinned - removed)

    def _change(self, change: Callable[[frozenset[str]], frozenset[str]]) -> None:
        with translate_os_errors(self._path):
            make_directory(self._path.parent)
            with self._lock:
                self.reload()
                changed = change(self.keys)
                if changed != self.keys:
                    with atomic_write(self._path) as file:
                        write_all(file, json.dumps({"pinned": sorted(changed)}).encode() + b"\n")
                self.reload()

    def _read(self) -> frozenset[str]:
        try:
            return frozenset(str(key) for key in json.loads(self._path.read_bytes())["pinned"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: cannot be read (%s); nothing is pinned until it is pinned again", self._path, error)
            return frozenset()
