"""Passages that callers hand over, which are none of the store's documents."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import StoreBusyError, StoreFullError

_T = TypeVar("_T")
log = logging.getLogger(__name__)
_TOKEN = np.dtype("<i4")
PREFIX = "prefix:"
"""Begins the owners of prompts' prefixes, followed by the generation of the documents that they may quote, and ":"."""
# Passages after which those whose block was evicted are taken off the list.
_PURGE_EVERY = 1024
_TABLES = """
CREATE TABLE IF NOT EXISTS passages (
    number INTEGER PRIMARY KEY AUTOINCREMENT, handle TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, token_ids BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS names (
    collection TEXT NOT NULL, id TEXT NOT NULL, source TEXT NOT NULL, handle TEXT NOT NULL,
    PRIMARY KEY (collection, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS named ON names (handle);
CREATE INDEX IF NOT EXISTS owned ON passages (owner);
"""


class Name(NamedTuple):
    """A passage in a collection of somebody else's, such as a vector store. source: what it was cut from"""

    id: str
    source: str
    handle: str


class PassageList:
    """The passages among the blocks of no document, by which they are found in prompts; kept beside the blocks.

    blocks: keys of those that are there, named as they would be as a document's; no document knows of them
    A damaged list is made anew, with a warning. Thread-safe; several processes may share one.
    """

    def __init__(self, root: Path, blocks: Container[str], *, read_only: bool) -> None:
        self.path = root / "passages.sqlite3"
        self._blocks = blocks
        self._read_only = read_only
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    def add(self, *listed: tuple[str, str, Sequence[int]]) -> None:
        """List passages, whose blocks are kept: the key, owner and token ids of each.

        owner: whose prompts it is found in: of one model, recipe and tenant
        Raises StoreFullError, StoreBusyError.
        """
        rows = [(key, owner, np.asarray(ids, _TOKEN).tobytes()) for key, owner, ids in listed]

        def add(database: sqlite3.Connection) -> None:
            query = "INSERT OR IGNORE INTO passages (handle, owner, token_ids) VALUES (?, ?, ?)"
            added = [database.execute(query, row) for row in rows]
            if any(one.rowcount == 1 and (one.lastrowid or 0) % _PURGE_EVERY == 0 for one in added):
                there = database.execute("SELECT handle FROM passages").fetchall()
                gone = [row for row in there if row[0] not in self._blocks]
                database.executemany("DELETE FROM passages WHERE handle = ?", gone)

        self._run(add, create=True)

    def passages(self, owner: str, *, after: int = 0) -> list[tuple[int, NDArray[np.int32]]]:
        """Number and token ids of the passages that were kept after that number, by rising number.

        Raises StoreError.
        """
        query = "SELECT number, token_ids FROM passages WHERE number > ? AND owner = ? ORDER BY number"
        rows = self._run(lambda database: database.execute(query, (after, owner)).fetchall()) or []
        return [(int(number), np.frombuffer(ids, _TOKEN)) for number, ids in rows]

    def found(self, owner: str, numbers: Iterable[int]) -> dict[int, list[int]]:
        """Token ids of these passages, as far as their block is there; the others are taken off the list.

        Raises StoreError.
        """

        def look(database: sqlite3.Connection) -> dict[int, list[int]]:
            there: dict[int, list[int]] = {}
            query = "SELECT handle, token_ids FROM passages WHERE number = ? AND owner = ?"
            for number in numbers:
                for handle, ids in database.execute(query, (number, owner)).fetchall():
                    if handle in self._blocks:
                        there[number] = np.frombuffer(ids, _TOKEN).tolist()
                    elif not self._read_only:
                        database.execute("DELETE FROM passages WHERE number = ?", (number,))
            return there

        return self._run(look) or {}

    def remove(self, *keys: str) -> None:
        """Take passages off the list, if they are there."""
        rows = [(key,) for key in keys]
        self._run(lambda database: database.executemany("DELETE FROM passages WHERE handle = ?", rows))

    def prefixes_before(self, generation: int) -> list[str]:
        """Handles of prompts' prefixes that may quote documents as they were before this generation."""
        query = "SELECT handle FROM passages WHERE owner >= ? AND owner < ? AND owner NOT GLOB ?"
        bounds = (PREFIX, PREFIX[:-1] + ";", f"{PREFIX}{generation}:*")
        rows = self._run(lambda database: database.execute(query, bounds).fetchall()) or []
        return [handle for (handle,) in rows]

    def name(self, collection: str, names: Iterable[Name]) -> list[str]:
        """Note which passages of a collection these are, each id in place of what it named before. Returns the handles
        that are named no more. Raises StoreFullError, StoreBusyError."""
        rows = list(names)

        def work(database: sqlite3.Connection) -> list[str]:
            gone = _unname(database, collection, "id = ?", [(one.id,) for one in rows])
            query = "INSERT OR REPLACE INTO names (collection, id, source, handle) VALUES (?, ?, ?, ?)"
            database.executemany(query, [(collection, *one) for one in rows])
            return _unnamed(database, gone)

        return self._run(work, create=True) or []

    def names(self, collection: str) -> list[Name]:
        """What is noted of a collection. Raises StoreBusyError."""
        query = "SELECT id, source, handle FROM names WHERE collection = ?"
        return [Name(*row) for row in self._run(lambda db: db.execute(query, (collection,)).fetchall()) or []]

    def unname(self, collection: str, ids: Iterable[str] = (), sources: Iterable[str] = ()) -> list[str]:
        """Take passages off a collection by id or source. Returns the handles that are named no more.

        Raises StoreFullError, StoreBusyError."""

        def work(database: sqlite3.Connection) -> list[str]:
            gone = _unname(database, collection, "id = ?", [(id,) for id in ids])
            gone |= _unname(database, collection, "source = ?", [(source,) for source in sources])
            return _unnamed(database, gone)

        return self._run(work) or []

    def unnamed(self, handles: Iterable[str]) -> list[str]:
        """Those of these handles that no collection names. Raises StoreBusyError."""
        wanted = dict.fromkeys(handles)
        found = self._run(lambda database: _unnamed(database, wanted))
        return list(wanted) if found is None else found

    def close(self) -> None:
        with self._lock:
            self._let_go()

    def _run(self, work: Callable[[sqlite3.Connection], _T], *, create: bool = False) -> _T | None:
        """What the work returns, in one transaction; None where there is no list. One that is damaged is removed."""
        with self._lock:
            try:
                database = self._open(create)
                if database is None:
                    return None
                with database:
                    return work(database)
            except sqlite3.OperationalError as error:
                self._let_go()
                if "locked" in str(error):
                    raise StoreBusyError(f"{self.path}: another process is writing to it; try again") from error
                raise StoreFullError(f"{self.path}: {error}; make room on its disk") from error
            except sqlite3.DatabaseError as error:
                self._let_go()
                log.warning("%s: damaged (%s); removed: passages from elsewhere are listed anew", self.path, error)
                if not self._read_only:
                    self.path.unlink(missing_ok=True)
                return None

    def _open(self, create: bool) -> sqlite3.Connection | None:
        if self._opened is None and (create or self.path.exists()):
            mode = "ro" if self._read_only else "rwc"
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            self._opened = sqlite3.connect(uri, timeout=30.0, uri=True, check_same_thread=False)
            if not self._read_only:
                self._opened.executescript(_TABLES)
        return self._opened

    def _let_go(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _unname(database: sqlite3.Connection, collection: str, where: str, rows: Iterable[tuple[str, ...]]) -> set[str]:
    """Handles of the names that were removed."""
    query = f"DELETE FROM names WHERE collection = ? AND {where} RETURNING handle"
    return {handle for row in rows for (handle,) in database.execute(query, (collection, *row)).fetchall()}


def _unnamed(database: sqlite3.Connection, handles: Iterable[str]) -> list[str]:
    query = "SELECT 1 FROM names WHERE handle = ?"
    return [handle for handle in handles if database.execute(query, (handle,)).fetchone() is None]
