"""A limit to the time that an answer may take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ragcache.errors import CancelledError


@contextmanager
def deadline(seconds: float | None) -> Iterator[threading.Event]:
    """An event that is set once the time is over: the engine gives up before its next token.

    Raises CancelledError, in place of the engine's own, that names the limit.
    """
    cancelled, expired = threading.Event(), threading.Event()

    def expire() -> None:
        expired.set()
        cancelled.set()

    timer = None if seconds is None else threading.Timer(seconds, expire)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield cancelled
    except CancelledError as error:
        if expired.is_set():
            raise CancelledError(f"the answer took longer than timeout={seconds} s; allow more time") from error
        raise
    finally:
        if timer is not None:
            timer.cancel()
