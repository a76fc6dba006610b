"""A set of vector ids in a byte for each id that was ever given out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class IdSet:
    """Ids count up from 0, so a row of flags holds them: a Python set takes 70 bytes for each, beside 100 of a vector
    that is compressed."""

    def __init__(self) -> None:
        self._held = np.zeros(0, dtype=bool)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, id: int) -> bool:
        return 0 <= id < len(self._held) and bool(self._held[id])

    def add(self, ids: Ids) -> None:
        """ids: 0 or more, each once."""
        if not len(ids):
            return
        least = int(ids.max()) + 1
        if least > len(self._held):
            grown = np.zeros(max(least, 2 * len(self._held)), dtype=bool)
            grown[: len(self._held)] = self._held
            self._held = grown
        self._size += len(ids) - int(self._held[ids].sum())
        self._held[ids] = True

    def discard(self, ids: Ids) -> Ids:
        """Returns those of the ids that were in it."""
        found = self.among(ids)
        self._held[found] = False
        self._size -= len(found)
        return found

    def among(self, ids: Ids) -> Ids:
        """Those of the ids that are in it, in their order."""
        known = ids[(ids >= 0) & (ids < len(self._held))]
        return known[self._held[known]]

    def array(self) -> Ids:
        """All of them, rising."""
        return np.flatnonzero(self._held)

    def bits(self) -> NDArray[np.uint8]:
        """A bit for each id, as FAISS reads them."""
        return np.packbits(self._held, bitorder="little")
