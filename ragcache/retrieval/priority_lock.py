"""A lock that gives questions priority."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from ragcache.forks import Home
from ragcache.models.deadline import LIMIT

QUESTION, PASSAGES = 0, 1


class PriorityLock:
    """A lock that goes to the waiting thread with the lowest rank, and among equal ranks to the first to arrive.

    A plain lock goes to the first thread to wake up, which is most often the thread that has just released it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets = count()
        self._waiting: list[tuple[int, int]] = []
        self._held = False
        self._home = Home("this embedder or reranker was loaded", "load it")

    @contextmanager
    def hold(self, rank: int) -> Iterator[None]:
        """Hold the lock for the length of a `with` block. rank: QUESTION or PASSAGES

        Raises CancelledError and TimedOutError under `deadline.limited`, while it waits, and ForkedError.
        """
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
