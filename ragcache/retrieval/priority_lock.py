"""A lock that questions get before everything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from ragcache.forks import Home
from ragcache.models.deadline import LIMIT

if TYPE_CHECKING:
    pass


QUESTION, PASSAGES = 0, 1


class PriorityLock:
    """Goes to the lowest rank that waits, and among equals to whoever came first. A plain lock goes to whoever happens
    to wake up, which is most often the one that has just released it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets = count()
        self._waiting: list[tuple[int, int]] = []
        self._held = False
        self._home = Home("this embedder or reranker was loaded", "load it")

    @contextmanager
    def hold(self, rank: int) -> Iterator[None]:
        """Raises CancelledError and TimedOutError within `limits.limited`, while it waits, and ForkedError."""
        self._home.check()
        limit = LIMIT.get()
        with self._changed:
            place = (rank, next(self._tickets))
            self._waiting.append(place)
            try:
                while self._held or min(self._waiting) != place:
                    limit.check()
                    self._changed.wait(limit.poll_s())
                self._held = True
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()
