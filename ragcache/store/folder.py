"""Open the database that has a store's documents, and no other database.

From its first opening on, the store's directory names the database (`StoreLayout.documents_in`) by an id that is kept
in the database itself: the database may move, but an empty or different database is never mistaken for it. Otherwise KV
blocks would seem to belong to no document, and `doctor` would delete them.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from ragcache import errors
from ragcache.store.database import Database, address
from ragcache.store.directory import NamedDatabase, StoreLayout
from ragcache.store.documents import DocumentStore

WAY_OUT = "name it: --database URL, RAGCACHE_DATABASE, or StoreConfig(database=...)"


def open_documents(layout: StoreLayout, url: str | None, *, read_only: bool) -> DocumentStore:
    """Open the documents of the store in `layout`.

    Args:
        url: address of the database; None: the SQLite file in the directory

    Raises:
        DatabaseMismatchError: the documents are in another database, or no database is named and they are not in the
            directory.
        StoreNotFoundError: their database cannot be reached. The errors of Database are raised, too.
    """
    named = layout.documents_in()
    inside = url is None or Path(address(url)).resolve() == layout.database.resolve()
    where = layout.database.name if url is None or inside else address(url)
    if url is None and named is not None and named.where != layout.database.name:
        raise errors.DatabaseMismatchError(f"{layout.root}: its documents are in {named.where}; {WAY_OUT}")
    if named is None and layout.has_content():
        raise errors.DatabaseMismatchError(
            f"{layout.root}: {layout.marker.name} does not name the database of its documents; restore it from a copy, "
            "or ingest the documents into a new store: ragcache ingest FOLDER --store NEW"
        )
    try:
        database = Database(url or layout.database, read_only=read_only, create=named is None)
    except (errors.StoreNotFoundError, errors.SchemaVersionError, errors.DatabaseMismatchError) as error:
        if named is None or named.where == where:
            raise
        raise _mismatch(layout, named.where, where) from error
    documents = DocumentStore(database)
    try:
        if named is not None and database_id(documents) != named.id:
            raise _mismatch(layout, named.where, where)
        if not read_only and (named is None or named.where != where):  # a new store, or a database that has moved
            _note(layout, NamedDatabase(where, database_id(documents)))
    except BaseException:
        documents.close()
        raise
    return documents


def database_id(documents: DocumentStore) -> str:
    """Return the database's random id, created at first use; "" if it is missing and cannot be created."""
    name = "database_id"
    if name not in documents.properties() and not documents.database.read_only:
        with suppress(errors.StoreMismatchError):  # another process was faster
            documents.bind(name, secrets.token_hex(16))
    return str(documents.properties().get(name, ""))


def _note(layout: StoreLayout, database: NamedDatabase) -> None:
    with layout.writer(5.0):
        there = layout.documents_in()  # another process may have been faster
        if there is not None and there.id != database.id:
            raise _mismatch(layout, there.where, database.where)
        layout.note_documents(database)


def _mismatch(layout: StoreLayout, named: str, where: str) -> errors.DatabaseMismatchError:
    if named == where:
        return errors.DatabaseMismatchError(
            f"{layout.root}: its documents are not in {where} any more, or in another schema of it; restore them from "
            "a copy, or make a new store in another directory"
        )
    way_out = "leave out --database" if named == layout.database.name else "name that one"
    return errors.DatabaseMismatchError(f"{layout.root}: its documents are in {named}, not in {where}; {way_out}")
