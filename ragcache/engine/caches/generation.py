"""The state of a store's documents that its caches reflect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ragcache.store.documents import DocumentStore


@dataclass(eq=False)
class Seen:
    """A state of the documents, as this process saw it. Two states are compared with `is`.

    KV that was computed under an earlier state may depend on a document that was deleted since.

    number: the documents' generation. Two states may have the same number: forgetting passages that belong to no
            document begins a new state without a new generation
    """

    number: int


class Generation:
    """The documents' generation, and the caches that a change invalidates (law 10). Thread-safe.

    refresh: drops blocks that other processes deleted
    current: reads the documents' present generation
    seen:    replaced by each change before the caches are invalidated
    """

    def __init__(self, documents: DocumentStore, refresh: Callable[[], object]) -> None:
        self.current = documents.generation
        self._refresh = refresh
        self._caches: list[Callable[[], object]] = []
        self._checked = self.current()
        self.seen = Seen(self._checked)

    def follow(self, *invalidate: Callable[[], object]) -> None:
        """Call these functions at every later change; each invalidates a cache."""
        self._caches += invalidate

    def check(self) -> None:
        """Drop deleted blocks and invalidate the caches if any process has changed documents since the last check.

        Each of several concurrent callers returns only when this is done. Raises StoreError.
        """
        number = self.current()
        if number != self._checked:
            self._refresh()
            self.invalidate()
            self._checked = number  # last: until then other callers invalidate the caches too

    def invalidate(self) -> None:
        """Invalidate the caches of this process, for example after passages that are no documents were deleted."""
        self.seen = Seen(self.current())
        for invalidate in self._caches:
            invalidate()

    def close(self) -> None:
        """Release the caches, which refer to this object, so that a closed store's memory is freed at once."""
        self._caches.clear()
