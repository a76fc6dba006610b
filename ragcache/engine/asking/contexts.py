"""Contexts that several questions read at the same time: placed once, held once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from ragcache.kv.buffers import SharedContext
from ragcache.models.limits import Limit


class Contexts:
    """Contexts before the suffixes of the answers in progress, by what they hold. Thread-safe.

    A context is known as long as some answer reads it; it costs no memory of its own.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[Hashable, SharedContext] = WeakValueDictionary()
        self._making: set[Hashable] = set()
        self._changed = threading.Condition()

    def find(self, key: Hashable) -> SharedContext | None:
        with self._changed:
            return self._known.get(key)

    @contextmanager
    def making(self, key: Hashable, limit: Limit) -> Iterator[SharedContext | Callable[[SharedContext], None]]:
        """The context known under this key; or, for the only caller that makes it at a time, the function to tell it.

        Others that want it wait. Raises what `limit` raises while it waits.
        """
        with self._changed:
            while key in self._making:
                limit.check()
                self._changed.wait(limit.poll_s())
            known = self._known.get(key)
            if known is None:
                self._making.add(key)
        if known is not None:
            yield known
            return
        try:
            yield lambda context: self._tell(key, context)
        finally:
            with self._changed:
                self._making.discard(key)
                self._changed.notify_all()

    def forget(self) -> None:
        """Let no further question find what is known: a passage in it may be gone (law 10)."""
        with self._changed:
            self._known.clear()

    def _tell(self, key: Hashable, context: SharedContext) -> None:
        with self._changed:
            self._known[key] = context
