"""Passages that callers supply and that belong to no document of the store."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import StoreBusyError, StoreFullError, translate_os_errors
from ragcache.files import make_directory
from ragcache.store.json_values import as_text, as_values

_T = TypeVar("_T")
log = logging.getLogger(__name__)
_TOKEN = np.dtype("<i4")
PREFIX = "prefix:"
"""The owners of prompts' prefixes begin with it, followed by the generation of the documents they may quote and ":"."""
OWNER = "owner:"
"""Prefix of a name that means an owner and not a collection, in `PassageList.learn` and `unlearn`. No collection's name
has a colon."""
NOBODY = "\1"
"""The collection of passages supplied without an id or a collection. Their ids are their handles. A name in this
collection does not keep KV: it is deleted together with the KV."""
# After so many new passages, passages whose block was evicted are removed from the list.
_PURGE_EVERY = 1024
# Texts with WINDOW + _NEXT_TO - 1 tokens in a row in common share the hash of a window of WINDOW tokens: `_anchors`.
WINDOW, _NEXT_TO = 8, 16
_TABLES = """
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS passages (
    number INTEGER PRIMARY KEY AUTOINCREMENT, handle TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, token_ids BLOB NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS names (
    collection TEXT NOT NULL, id TEXT NOT NULL, source TEXT NOT NULL, handle TEXT NOT NULL, about TEXT NOT NULL,
    PRIMARY KEY (collection, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS named ON names (handle);
CREATE INDEX IF NOT EXISTS owned ON passages (owner);
CREATE TABLE IF NOT EXISTS learnt (
    handle TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (handle, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quotes (
    hash INTEGER NOT NULL, handle TEXT NOT NULL, PRIMARY KEY (hash, handle)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS quoting ON quotes (handle);
CREATE TABLE IF NOT EXISTS deletions (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""


class Name(NamedTuple):
    """A passage's name in a collection outside the store, such as a vector store.

    id:     "" if the passage has no id
    source: the source that the passage was cut from
    title, metadata: of the user's own document; values that are not JSON are kept as text
    """

    id: str
    source: str
    handle: str
    title: str = ""
    metadata: Mapping[str, Any] = MappingProxyType({})


class Listed(NamedTuple):
    """A passage whose block is stored, as the list holds it.

    owner:     names the model, recipe and salt whose prompts are searched for the passage
    num_bytes: size of its KV when it was stored
    """

    handle: str
    owner: str
    token_ids: Sequence[int]
    num_bytes: int = 0


class FoundPassage(NamedTuple):
    """A listed passage whose block is stored.

    name:      the user's name for it, or None
    is_learnt: whether it was learnt from prompts and has no name
    """

    token_ids: list[int]
    name: Name | None
    is_learnt: bool


@dataclass(frozen=True)
class ForeignUsage:
    """Usage of the cache that holds the KV of foreign passages and of prompts.

    passages, bytes: number of passages whose KV is stored, and its size on disk
    prompt_bytes:    size of the prompts' KV on disk
    budget_bytes:    limit for both (`StoreConfig.foreign_cache`)
    evicted, evicted_bytes: listed passages whose KV did not fit or was evicted, and its size
    """

    passages: int
    bytes: int
    prompt_bytes: int
    budget_bytes: int
    evicted: int
    evicted_bytes: int


class PassageList:
    """The list of the passages whose blocks belong to no document, by which prompts are searched; kept beside the
    blocks.

    blocks: keys of the stored blocks, named as a document's blocks would be; no document refers to them
    reported: number of evicted passages in the last warning

    A damaged list is created anew, with a warning. Thread-safe; several processes may share a list.
    """

    reported = 0

    def __init__(self, root: Path, blocks: Container[str], *, read_only: bool) -> None:
        self.path = root / "passages.sqlite3"
        self._blocks = blocks
        self._read_only = read_only
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    def add(self, *listed: Listed) -> None:
        """List passages. Raises StoreFullError, StoreBusyError."""
        self._run(lambda database: self._insert(database, listed), create=True)

    def learn(self, one: Listed, names: Sequence[str], deletions: int) -> bool:
        """List a passage that was learnt from a prompt. Return False, and do nothing, if text was deleted meanwhile.

        Args:
            one:       The passage.
            names:     The names by which `unlearn` finds the passage.
            deletions: The result of `deletions(names)` when the prompt had been answered.

        Raises StoreFullError, StoreBusyError.
        """

        def work(database: sqlite3.Connection) -> bool:
            database.execute("BEGIN IMMEDIATE")  # no text may be deleted between the check and the entry
            if _deletions(database, names) != deletions:
                return False
            self._insert(database, [one])
            query = "INSERT OR IGNORE INTO learnt (handle, name) VALUES (?, ?)"
            database.executemany(query, [(one.handle, name) for name in names])
            query = "INSERT OR IGNORE INTO quotes (hash, handle) VALUES (?, ?)"
            database.executemany(query, [(number, one.handle) for number in _anchors(one.token_ids)])
            return True

        return bool(self._run(work, create=True))

    def deletions(self, names: Sequence[str]) -> int:
        """Return a number that rises whenever `unlearn` is called with one of these names. Raises StoreFullError,
        StoreBusyError."""
        return self._run(lambda database: _deletions(database, names), create=True) or 0

    def unlearn(self, texts: Iterable[tuple[Sequence[str], Sequence[int]]], dropped: Iterable[str] = ()) -> list[str]:
        """Return the handles of passages that were learnt from prompts and that the caller has to delete now.

        These are the passages that quote a deleted text, with at least WINDOW + _NEXT_TO - 1 of its tokens in a row,
        and those of the dropped names. Passages that a collection names are left out.

        Args:
            texts:   For each deleted text, the names under which passages that quote it may have been learnt, and its
                     token ids. A name is that of a collection that the prompt's view read (OTHERS: all collections), or
                     OWNER followed by the passage's owner.
            dropped: Names whose passages are all deleted.

        Raises StoreFullError, StoreBusyError.
        """

        def work(database: sqlite3.Connection) -> list[str]:
            database.execute("BEGIN IMMEDIATE")  # nothing may be learnt between the search and the count
            found, changed = set[str](), set(dropped)
            for name in changed:
                rows = database.execute("SELECT handle FROM learnt WHERE name = ?", (name,))
                found.update(handle for (handle,) in rows.fetchall())
            for names, ids in texts:
                changed.update(names)
                query = "SELECT handle FROM quotes JOIN learnt USING (handle) WHERE hash = ?"
                query = f"{query} AND name IN ({_marks(names)})"
                for number in _anchors(ids):
                    found.update(handle for (handle,) in database.execute(query, (number, *names)).fetchall())
            query = "INSERT INTO deletions VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET number = number + 1"
            database.executemany(query, [(name,) for name in changed])
            return _unnamed(database, found)

        return self._run(work) or []

    def token_ids(self, handles: Iterable[str]) -> list[list[int]]:
        """Return the token ids of the passages with these handles; passages that are not listed are left out.

        Raises StoreBusyError.
        """
        wanted = [(handle,) for handle in handles]
        query = "SELECT token_ids FROM passages WHERE handle = ?"
        rows = self._run(lambda db: [row for one in wanted for row in db.execute(query, one).fetchall()]) or []
        return [np.frombuffer(ids, _TOKEN).tolist() for (ids,) in rows]

    def passages(self, owner: str, *, after: int = 0) -> list[tuple[int, NDArray[np.int32]]]:
        """Return number and token ids of the owner's passages with a number above `after`, sorted by number.

        Raises StoreError.
        """
        query = "SELECT number, token_ids FROM passages WHERE number > ? AND owner = ? ORDER BY number"
        rows = self._run(lambda database: database.execute(query, (after, owner)).fetchall()) or []
        return [(int(number), np.frombuffer(ids, _TOKEN)) for number, ids in rows]

    def found(self, owner: str, numbers: Iterable[int]) -> dict[int, FoundPassage]:
        """Return the owner's passages with these numbers whose block is stored, by number. Raises StoreError.

        The others are removed from the list, unless a collection names them.
        """

        def look(database: sqlite3.Connection) -> dict[int, FoundPassage]:
            there: dict[int, FoundPassage] = {}
            query = "SELECT handle, token_ids FROM passages WHERE number = ? AND owner = ?"
            for number in numbers:
                for handle, ids in database.execute(query, (number, owner)).fetchall():
                    if handle in self._blocks:
                        name = _name_of(database, handle)
                        is_learnt = name is None and _is_learnt(database, handle)
                        there[number] = FoundPassage(np.frombuffer(ids, _TOKEN).tolist(), name, is_learnt)
                    elif not self._read_only:
                        _take_off(database, _unnamed(database, [handle]))
            return there

        return self._run(look) or {}

    def last(self) -> int:
        """Return the number of the passage that was listed last, or 0 for none. Raises StoreError."""
        query = "SELECT max(number) FROM passages"
        return self._run(lambda database: database.execute(query).fetchone()[0]) or 0

    def owners(self, token_ids: Sequence[int], last: int | None = None) -> set[str]:
        """Return the owners under which a passage is listed, even if its block was evicted. Raises StoreError.

        last: the highest number of a passage to look at; None: all
        """
        query = "SELECT owner FROM passages WHERE token_ids = ? AND number <= ?"
        values = (np.asarray(token_ids, _TOKEN).tobytes(), sys.maxsize if last is None else last)
        return {owner for (owner,) in self._run(lambda database: database.execute(query, values).fetchall()) or []}

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every listed passage's KV by handle, including passages whose block was evicted.

        Prompts' prefixes are left out. Raises StoreError.
        """
        query = "SELECT handle, num_bytes FROM passages WHERE owner NOT GLOB ?"
        return dict(self._run(lambda database: database.execute(query, (f"{PREFIX}*",)).fetchall()) or [])

    def contents(self) -> list[list[int]]:
        """Return the token ids of every listed passage whose block is stored, each text once. Raises StoreError."""
        query = "SELECT handle, token_ids FROM passages WHERE owner NOT GLOB ? ORDER BY number"
        rows = self._run(lambda database: database.execute(query, (f"{PREFIX}*",)).fetchall()) or []
        found = dict.fromkeys(ids for handle, ids in rows if handle in self._blocks)
        return [np.frombuffer(ids, _TOKEN).tolist() for ids in found]

    def remove(self, *keys: str) -> None:
        """Remove passages from the list, if they are on it."""
        self._run(lambda database: _take_off(database, keys))

    def prefixes_before(self, generation: int) -> list[str]:
        """Return the handles of prompts' prefixes that may quote documents from before this generation."""
        query = "SELECT handle FROM passages WHERE owner >= ? AND owner < ? AND owner NOT GLOB ?"
        bounds = (PREFIX, PREFIX[:-1] + ";", f"{PREFIX}{generation}:*")
        rows = self._run(lambda database: database.execute(query, bounds).fetchall()) or []
        return [handle for (handle,) in rows]

    def name(self, collection: str, names: Iterable[Name]) -> list[str]:
        """Record which passages a collection's ids name, replacing what each id named before. Return the handles that
        no collection names now. Raises StoreFullError, StoreBusyError."""
        rows = list(names)

        def work(database: sqlite3.Connection) -> list[str]:
            gone = _unname(database, collection, "id = ?", [(one.id,) for one in rows])
            query = "INSERT OR REPLACE INTO names (collection, id, source, handle, about) VALUES (?, ?, ?, ?, ?)"
            database.executemany(query, [(collection, one.id, one.source, one.handle, _about(one)) for one in rows])
            return _unnamed(database, gone)

        return self._run(work, create=True) or []

    def names(self, collection: str) -> list[Name]:
        """Return the names recorded for a collection, without titles and metadata. Raises StoreBusyError."""
        query = "SELECT id, source, handle FROM names WHERE collection = ?"
        return [Name(*row) for row in self._run(lambda db: db.execute(query, (collection,)).fetchall()) or []]

    def unname(self, collection: str, ids: Iterable[str] = (), sources: Iterable[str] = ()) -> list[str]:
        """Remove passages from a collection by id or source. Return the handles that no collection names now.

        Raises StoreFullError, StoreBusyError.
        """

        def work(database: sqlite3.Connection) -> list[str]:
            gone = _unname(database, collection, "id = ?", [(id,) for id in ids])
            gone |= _unname(database, collection, "source = ?", [(source,) for source in sources])
            return _unnamed(database, gone)

        return self._run(work) or []

    def unnamed(self, handles: Iterable[str]) -> list[str]:
        """Return those of the given handles that no collection names. Raises StoreBusyError."""
        wanted = dict.fromkeys(handles)
        found = self._run(lambda database: _unnamed(database, wanted))
        return list(wanted) if found is None else found

    def close(self) -> None:
        with self._lock:
            self._let_go()

    def _insert(self, database: sqlite3.Connection, listed: Iterable[Listed]) -> None:
        """List passages. Now and then, remove those whose block was evicted."""
        query = "INSERT OR IGNORE INTO passages (handle, owner, token_ids, num_bytes) VALUES (?, ?, ?, ?)"
        rows = [(one.handle, one.owner, np.asarray(one.token_ids, _TOKEN).tobytes(), one.num_bytes) for one in listed]
        added = [database.execute(query, row) for row in rows]
        if any(one.rowcount == 1 and (one.lastrowid or 0) % _PURGE_EVERY == 0 for one in added):
            query = "SELECT handle FROM passages WHERE handle NOT IN (SELECT handle FROM names WHERE collection != ?)"
            there = [handle for (handle,) in database.execute(query, (NOBODY,)).fetchall()]
            _take_off(database, [handle for handle in there if handle not in self._blocks])

    def _run(self, work: Callable[[sqlite3.Connection], _T], *, create: bool = False) -> _T | None:
        """Return the result of `work`, run in a single transaction; None if there is no list, or if it is damaged.

        A damaged list is removed, with a warning.

        create: whether a missing list is created

        Raises StoreBusyError, StoreFullError.
        """
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
                with translate_os_errors(self.path):
                    make_directory(self.path.parent)
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            self._opened = sqlite3.connect(uri, timeout=30.0, uri=True, check_same_thread=False)
            if not self._read_only:
                self._opened.executescript(_TABLES)
        return self._opened

    def _let_go(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def window_hashes(ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return a hash of each window of WINDOW tokens, from left to right; the same in every process."""
    values = np.asarray(ids, np.int64).astype(np.uint64) + np.uint64(1)
    if len(values) < WINDOW:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(len(values) - WINDOW + 1, np.uint64)
    for at in range(WINDOW):
        hashes = (hashes ^ values[at : at + len(hashes)]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _anchors(ids: Sequence[int]) -> list[int]:
    """Return the least hashes of every _NEXT_TO windows in a row, each once, as SQLite's signed integers.

    Two texts with WINDOW + _NEXT_TO - 1 tokens in a row in common have a number in common.
    """
    hashes = window_hashes(ids)
    if not len(hashes):
        return []
    rows = np.lib.stride_tricks.sliding_window_view(hashes, min(_NEXT_TO, len(hashes)))
    return [int(number) for number in np.unique(rows.min(axis=1)).view(np.int64)]


def _deletions(database: sqlite3.Connection, names: Sequence[str]) -> int:
    query = f"SELECT sum(number) FROM deletions WHERE name IN ({_marks(names)})"
    return database.execute(query, names).fetchone()[0] or 0


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))


def _unname(database: sqlite3.Connection, collection: str, where: str, rows: Iterable[tuple[str, ...]]) -> set[str]:
    """Delete names and return their handles."""
    query = f"DELETE FROM names WHERE collection = ? AND {where} RETURNING handle"
    return {handle for row in rows for (handle,) in database.execute(query, (collection, *row)).fetchall()}


def _unnamed(database: sqlite3.Connection, handles: Iterable[str]) -> list[str]:
    query = "SELECT 1 FROM names WHERE handle = ? AND collection != ?"
    return [handle for handle in handles if database.execute(query, (handle, NOBODY)).fetchone() is None]


def _take_off(database: sqlite3.Connection, handles: Iterable[str]) -> None:
    """Remove passages from the list, with their names that belong to no collection."""
    for handle in handles:
        database.execute("DELETE FROM passages WHERE handle = ?", (handle,))
        database.execute("DELETE FROM learnt WHERE handle = ?", (handle,))
        database.execute("DELETE FROM quotes WHERE handle = ?", (handle,))
        database.execute("DELETE FROM names WHERE collection = ? AND id = ?", (NOBODY, handle))


def _is_learnt(database: sqlite3.Connection, handle: str) -> bool:
    return database.execute("SELECT 1 FROM learnt WHERE handle = ?", (handle,)).fetchone() is not None


def _name_of(database: sqlite3.Connection, handle: str) -> Name | None:
    """Return the passage's name in the first of its collections."""
    query = "SELECT id, source, about FROM names WHERE handle = ? ORDER BY collection = ?, collection, id LIMIT 1"
    row = database.execute(query, (handle, NOBODY)).fetchone()
    if row is None:
        return None
    id, source, about = row
    told = json.loads(about)
    return Name("" if id == handle else id, source, handle, told.get("title", ""), told.get("metadata", {}))


def _about(name: Name) -> str:
    return json.dumps({"title": as_text(name.title), "metadata": as_values(name.metadata)})
