"""Collections: named sets of a store's documents, each with a secret that salts its KV, and views of some of them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Column, ColumnElement, delete, insert, or_, select

from ragcache.errors import ConfigError, NoSuchCollectionError
from ragcache.kv.block_key import digest
from ragcache.store.database import Database
from ragcache.store.schema import DEFAULT, advance, collections

OTHERS = "*"
"""In a view: every collection that is not an OpenAI vector store."""
VECTOR_STORE = "vs_"
"""The names of collections that are OpenAI vector stores begin with it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class View:
    """The collections that a caller may see and change.

    reads, writes: names of the collections that the caller may see, and change; OTHERS among them includes every
                   collection that is not an OpenAI vector store; None: every collection
    into:   the collection that new documents are added to; None: the caller has to name it
    """

    reads: frozenset[str] | None = None
    writes: frozenset[str] | None = None
    into: str | None = DEFAULT

    @classmethod
    def of(cls, reads: Iterable[str], writes: Iterable[str]) -> View:
        """Return a view whose new documents go to `default`, or to the only collection that it may change."""
        changed = frozenset(writes)
        own = DEFAULT if may(changed, DEFAULT) else next(iter(changed)) if len(changed) == 1 else None
        return cls(frozenset(reads), changed, own)

    def only(self, name: str) -> View:
        """Return this view, restricted to the collection `name`.

        Raises NoSuchCollectionError if this view neither reads nor changes that collection.
        """
        if not (may(self.reads, name) or may(self.writes, name)):
            raise no_collection(name)
        reads, writes = ([name] if may(seen, name) else [] for seen in (self.reads, self.writes))
        return View(frozenset(reads), frozenset(writes), name if writes else None)


EVERYTHING = View()


def may(names: frozenset[str] | None, name: str) -> bool:
    """Return whether a view's names include the collection `name`."""
    return names is None or name in names or (OTHERS in names and not name.startswith(VECTOR_STORE))


def within(column: Column[str], names: frozenset[str]) -> ColumnElement[bool]:
    """Return the condition that a column names a collection in `names`."""
    named = column.in_(sorted(names))
    return or_(~column.startswith(VECTOR_STORE, autoescape=True), named) if OTHERS in names else named


def no_collection(name: str) -> NoSuchCollectionError:
    """Return the error for a collection that does not exist, or that the caller may not see."""
    return NoSuchCollectionError(
        f"there is no collection {name!r}, or this key may not use it; `ragcache collections` lists them"
    )


class CollectionTable:
    """The collections of a database.

    The collection `default` always exists. KV of `default` and of public collections has no salt.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def secrets(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return the secret of each collection by its name, sorted by name; "" for a collection whose KV has no salt.

        names: of the collections to look up, of which missing ones are left out; None: all
        """
        query, wanted = select(collections.c.name, collections.c.secret), None if names is None else set(names)
        query = query if wanted is None else query.where(collections.c.name.in_(wanted))
        with self._db.read() as connection:
            found = {row.name: row.secret for row in connection.execute(query)}
        return dict(sorted({**({DEFAULT: ""} if wanted is None or DEFAULT in wanted else {}), **found}.items()))

    def secret(self, name: str) -> str | None:
        """Return the secret of a collection, or None if it does not exist."""
        return "" if name == DEFAULT else self.secrets([name]).get(name)

    def create(self, name: str, *, public: bool = False) -> None:
        """Create a collection, unless it exists.

        public: leave its KV without a salt, so that it is shared with every collection that is public too

        Raises ConfigError for a name that cannot be used, StoreReadOnlyError, StoreBusyError.
        """
        check_name(name)
        if self.secret(name) is not None:
            return
        row = {"name": name, "secret": "" if public else secrets.token_hex(16), "created_at": time.time()}
        with self._db.write() as connection:
            advance(connection, "generation", 0)
            if connection.scalar(select(collections.c.name).where(collections.c.name == name)) is None:
                connection.execute(insert(collections), row)

    def drop(self, name: str) -> None:
        """Delete a collection's row and secret, so that a new collection of this name finds none of its KV.

        Its documents have to be deleted by the caller. Raises StoreReadOnlyError, StoreBusyError.
        """
        with self._db.write() as connection:
            advance(connection, "generation")
            connection.execute(delete(collections).where(collections.c.name == name))

    def salt(self, view: View) -> str:
        """Return the salt of KV that belongs to a view and not to a document: that of prompts and of given passages.

        It is derived from the secrets of all collections that the view reads, so that no other view finds this KV. A
        view of a single collection with a secret has that secret, and so shares the KV of the collection's documents. A
        view that reads every collection, or OTHERS, has no salt ("").

        Raises NoSuchCollectionError if a collection does not exist.
        """
        if view.reads is None or OTHERS in view.reads:
            return ""
        known = self.secrets(view.reads)
        if missing := sorted(view.reads - known.keys()):
            raise no_collection(missing[0])
        own = sorted(known[name] for name in view.reads)
        return own[0] if len(own) == 1 and own[0] else digest({"view": own})


def check_name(name: str) -> None:
    """Raise ConfigError for a text that cannot be a collection's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a collection; use 1 to 64 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit",
            "collection",
        )
