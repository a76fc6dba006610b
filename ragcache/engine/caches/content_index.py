"""Finds passages in any prompt by their token ids.

A passage is known by three numbers: the hash of one window of its tokens (its anchor), the window's offset in the
passage, and the hash of all its tokens but the outermost. A prompt's hashes at every position come from one prefix sum,
so that any number of passages are searched for at once. `PassageFinder` then compares the candidates token by token: a
passage is found where its own ids occur, whatever text surrounds them (law 15). A tokenizer may merge a passage's first
and last characters with their neighbours, so up to EDGE tokens at either end may differ; they run with the prompt.

Token ids are used because a passage found by its characters would have to be verified in tokens anyway.
"""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragcache.files import atomic_write, write_all

WINDOW = 8
EDGE = 2
# Most pairs of a place and a passage that are compared for a prompt, because near-copies of a passage share anchors.
MOST_PAIRS = 1 << 17
_BATCH = 4096
_BITS = 22
_VERSION = 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64

Hashes = NDArray[np.uint64]
Ids = NDArray[np.int64]


class Found(NamedTuple):
    """A passage whose inner tokens probably occupy the tokens [start, end) of a prompt.

    name: the number under which the passage was added
    """

    start: int
    end: int
    name: int


class ContentIndex:
    """An index that finds passages in rows of token ids. Thread-safe.

    It takes 32 bytes per passage and holds neither text nor token ids. A passage of fewer than WINDOW tokens is left
    out: computing it costs less than a search.
    """

    def __init__(self) -> None:
        self._powers = _Powers()
        self._lock = threading.Lock()
        self._new: list[_Rows] = []
        self._rows = _no_rows()
        self._bitmap = np.zeros(1 << (_BITS - 3), np.uint8)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(rows.names) for rows in (self._rows, *self._new))

    def add(self, passages: Iterable[tuple[int, Sequence[int] | NDArray[np.integer[Any]]]]) -> None:
        """Add passages, each a name (its vector id or its number in the list of foreign passages) and its token ids.

        A passage that is added twice is found once.
        """
        batch: list[tuple[int, Ids]] = []
        for name, ids in passages:
            if len(ids) >= WINDOW:
                batch.append((name, np.asarray(ids, np.int64)))
            if len(batch) == _BATCH:
                self._add(batch)
                batch = []
        if batch:
            self._add(batch)

    def clear(self) -> None:
        with self._lock:
            self._new, self._rows = [], _no_rows()
            self._bitmap[:] = 0

    def save(self, path: Path, last: int) -> None:
        """Write the index to a file. last: a number that `load` gives back.

        Raises StoreReadOnlyError, StoreFullError.
        """
        with self._lock:
            self._settle()
            columns = self._rows._asdict()
        data = io.BytesIO()
        np.savez(data, version=_VERSION, last=last, **columns)
        with atomic_write(path) as file:
            write_all(file, data.getbuffer())

    def load(self, path: Path) -> int | None:
        """Replace the contents by those that `save` wrote, and return its number, or None if the file cannot be read.

        A damaged file cannot cause wrong results, because every candidate is compared token by token.
        """
        try:
            with open(path, "rb") as opened, np.load(opened) as file:
                rows = _Rows(*(file[name] for name in _Rows._fields))
                last, version = int(file["last"]), int(file["version"])
        except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        empty = _no_rows()
        columns: list[tuple[Any, Any]] = list(zip(rows, empty, strict=True))
        shape = rows.names.shape[:1]
        if version != _VERSION or any(one.dtype != own.dtype or one.shape != shape for one, own in columns):
            return None
        with self._lock:
            self._bitmap[:] = 0
            self._rows, self._new = empty, [rows]
        return last

    def find(self, ids: Sequence[int] | Ids) -> list[Found]:
        """Return the places where a passage's inner tokens probably occur, left to right and without overlaps.

        Of passages that begin at the same place the longest is returned, and among equally long passages the highest
        name.
        """
        row = np.asarray(ids, np.int64)
        with self._lock:
            self._settle()
            rows, bitmap = self._rows, self._bitmap
            if len(row) < WINDOW or not len(rows.names):
                return []
            sums = self._powers.sums(row)
            hashes = self._powers.hashes(sums, np.arange(len(row) - WINDOW + 1), WINDOW)
            low = hashes & np.uint64((1 << _BITS) - 1)
            at = np.flatnonzero(bitmap[(low >> np.uint64(3)).astype(np.int64)] >> (low & np.uint64(7)) & 1)
            places, which = _pairs(rows.anchors, hashes[at], at)
            start = places - rows.offsets[which]
            end = start + rows.lengths[which]
            inside = (start >= 0) & (end <= len(row))
            start, end, which = start[inside], end[inside], which[inside]
            equal = self._powers.hashes(sums, start, end - start) == rows.cores[which]
        start, end, names = start[equal], end[equal], rows.names[which[equal]]
        found: list[Found] = []
        for rank in np.lexsort((-names, -end, start)).tolist():
            if start[rank] >= (found[-1].end if found else 0):
                found.append(Found(int(start[rank]), int(end[rank]), int(names[rank])))
        return found

    def _add(self, batch: Sequence[tuple[int, Ids]]) -> None:
        """Index a batch at once: join its tokens in a row, and choose each passage's window with the least hash."""
        sizes = np.array([len(ids) for _, ids in batch])
        edges = np.minimum(EDGE, (sizes - WINDOW) // 2)
        begin = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        start, end = begin + edges, begin + sizes - edges
        with self._lock:
            sums = self._powers.sums(np.concatenate([ids for _, ids in batch]))
            hashes = self._powers.hashes(sums, np.arange(len(sums) - WINDOW), WINDOW)
            cores = self._powers.hashes(sums, start, end - start)
            least = _least(hashes, start, end - WINDOW + 1)
            names = np.array([name for name, _ in batch], np.int64)
            self._new.append(
                _Rows(hashes[least], cores, (least - start).astype(np.uint32), (end - start).astype(np.uint32), names)
            )

    def _settle(self) -> None:
        """Sort the rows added since the last search into the index."""
        if not self._new:
            return
        columns: list[Any] = [np.concatenate(column) for column in zip(self._rows, *self._new, strict=True)]
        order = np.lexsort((columns[-1], columns[0]))
        self._rows, self._new = _Rows(*(column[order] for column in columns)), []
        low = self._rows.anchors & np.uint64((1 << _BITS) - 1)
        bits = np.left_shift(np.uint8(1), (low & np.uint64(7)).astype(np.uint8))
        np.bitwise_or.at(self._bitmap, (low >> np.uint64(3)).astype(np.int64), bits)


class _Rows(NamedTuple):
    """Columns of the index, with a row for each passage.

    anchors: hash of the passage's anchor window, by which the rows are sorted
    cores:   hash of the passage's inner tokens: all but the outermost
    offsets: position of the anchor window within the inner tokens
    lengths: number of inner tokens
    names:   the passage's name
    """

    anchors: Hashes
    cores: Hashes
    offsets: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    names: Ids


def _no_rows() -> _Rows:
    hashes, counts = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    return _Rows(hashes, hashes, counts, counts, np.zeros(0, np.int64))


def _least(hashes: Hashes, starts: Ids, stops: Ids) -> Ids:
    """Return the position of each range's least hash, the first of equal hashes. The ranges rise and are not empty."""
    bounds = np.stack([starts, stops], axis=1).reshape(-1)
    least = np.minimum.reduceat(np.append(hashes, hashes[:1]), bounds)[::2]
    sizes = stops - starts
    rank = np.repeat(np.arange(len(starts)), sizes)
    places = np.arange(sizes.sum()) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
    equal = hashes[places] == least[rank]
    _, first = np.unique(rank[equal], return_index=True)
    return np.asarray(places[equal][first])


def _pairs(anchors: Hashes, hashes: Hashes, at: Ids) -> tuple[Ids, Ids]:
    """Return a place and a row number for each pair of equal hashes, at most MOST_PAIRS pairs.

    anchors: hashes of the rows, rising
    hashes:  hashes of the windows at the places `at`
    """
    left, right = (np.searchsorted(anchors, hashes, side) for side in ("left", "right"))
    counts = right - left
    within = np.cumsum(counts) <= MOST_PAIRS
    at, left, counts = at[within], left[within], counts[within]
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(at, counts), np.repeat(left, counts) + np.arange(counts.sum()) - before


class _Powers:
    """Polynomial hashes of ids[i : i + n] modulo 2**64: the sum over k < n of (value of ids[i + k]) * BASE**k.

    The powers of BASE and of its inverse are kept, and computed further when a longer row comes.
    """

    def __init__(self) -> None:
        self._up = np.ones(1, np.uint64)
        self._down = np.ones(1, np.uint64)

    def sums(self, ids: Ids) -> Hashes:
        """Return the prefix sums of a row: zero, then the sum up to each id."""
        self._reach(len(ids))
        values = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
        values ^= values >> np.uint64(32)
        sums = np.zeros(len(ids) + 1, np.uint64)
        np.cumsum(values * self._up[: len(ids)], out=sums[1:])
        return sums

    def hashes(self, sums: Hashes, starts: Ids, lengths: Ids | int) -> Hashes:
        """Return the hash of the tokens [start, start + length) for each start: uint64 [number of starts].

        sums: the row's prefix sums, from `sums`
        """
        found = (sums[starts + lengths] - sums[starts]) * self._down[starts]
        return np.asarray(found ^ (found >> np.uint64(29)))

    def _reach(self, count: int) -> None:
        if len(self._up) <= count:
            size = 1 << count.bit_length()
            for name, base in (("_up", _BASE), ("_down", pow(_BASE, -1, 1 << 64))):
                row = np.full(size + 1, base, np.uint64)
                row[0] = 1
                setattr(self, name, np.cumprod(row))
