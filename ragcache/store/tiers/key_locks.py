"""A lock for each key, which exists only while it is held or waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class KeyLocks:
    """Locks by key: work on a key excludes other work on it; different keys do not wait for each other."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold the key's lock, waiting for it. Not reentrant."""
        with self._guard:
            lock, waiting = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, waiting + 1)
        try:
            with lock:
                yield
        finally:
            self._leave(key)

    @contextmanager
    def try_hold(self, key: str) -> Iterator[bool]:
        """Hold the key's lock and yield True if it is free; otherwise yield False at once."""
        with self._guard:
            free = key not in self._locks
            if free:
                lock = threading.Lock()
                lock.acquire()
                self._locks[key] = (lock, 1)
        try:
            yield free
        finally:
            if free:
                lock.release()
                self._leave(key)

    def _leave(self, key: str) -> None:
        with self._guard:
            lock, waiting = self._locks.pop(key)
            if waiting > 1:
                self._locks[key] = (lock, waiting - 1)

    def __len__(self) -> int:
        return len(self._locks)
