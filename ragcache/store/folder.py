"""Open the database that has a store's documents, and no other one.

The store's directory names it from its first opening on (`StoreLayout.documents_in`), by an id that is kept in the
database itself: it may move, but an empty or another one is never taken for it. KV blocks would seem to belong to no
document there, and `doctor` would delete them.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import closing, suppress
from pathlib import Path

from ragcache.errors import (
    DatabaseMismatchError,
    SchemaVersionError,
    StoreBusyError,
    StoreError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreReadOnlyError,
)
from ragcache.store.database import Database, address
from ragcache.store.directory import NamedDatabase, StoreLayout
from ragcache.store.documents import DocumentStore

log = logging.getLogger(__name__)

WAY_OUT = "name it: --database URL, RAGCACHE_DATABASE, or StoreConfig(database=...)"


def open_documents(layout: StoreLayout, url: str | None, *, read_only: bool) -> DocumentStore:
    """The documents of the store in `layout`. url: of their database; None: the SQLite file in the directory

    Raises DatabaseMismatchError where they are in another database, or none is named and they are not in the
    directory; StoreNotFoundError where the database that has them cannot be reached; and what Database raises.
    """
    named = layout.documents_in()
    inside = url is None or Path(address(url)).resolve() == layout.database.resolve()
    where = layout.database.name if url is None or inside else address(url)
    if url is None and named is not None and named.where != layout.database.name:
        raise DatabaseMismatchError(f"{layout.root}: its documents are in {named.where}; {WAY_OUT}")
    lacks = url is None and named is None and not layout.database.exists()
    if lacks and (layout.index.exists() or layout.some_blocks(1)):
        raise DatabaseMismatchError(f"{layout.root}: its documents are in a database elsewhere; {WAY_OUT}")
    try:
        database = Database(url or layout.database, read_only=read_only, create=named is None)
    except (StoreNotFoundError, SchemaVersionError, DatabaseMismatchError) as error:
        if named is None or named.where == where:
            raise
        raise _mismatch(layout, named.where, where) from error
    documents = DocumentStore(database)
    try:
        if named is None:
            _take_unnamed(layout, documents, where)
        else:
            if database_id(documents) != named.id:
                raise _mismatch(layout, named.where, where)
            if named.where != where and not read_only:
                _note(layout, NamedDatabase(where, named.id))  # it has moved
    except BaseException:
        documents.close()
        raise
    return documents


def database_id(documents: DocumentStore) -> str:
    """A random name, made at first use; "" where it is not made, and cannot be."""
    name = "database_id"
    if name not in documents.properties() and not documents.database.read_only:
        with suppress(StoreMismatchError):  # another process was faster
            documents.bind(name, secrets.token_hex(16))
    return str(documents.properties().get(name, ""))


def refuse_unproven(layout: StoreLayout) -> None:
    """Raises DatabaseMismatchError where it is not known that the opened database has the documents of the directory's
    blocks: none of them may be deleted then."""
    if layout.documents_in() is None:
        raise DatabaseMismatchError(
            f"{layout.root}: {_unknown(layout)}; nothing was changed. If another database has them, {WAY_OUT}; if an "
            "ingestion broke off before its first document, run it again"
        )


def _take_unnamed(layout: StoreLayout, documents: DocumentStore, where: str) -> None:
    """For a new store, or one of a version that wrote no name down: name the database, if it is the one."""
    inside = where == layout.database.name
    blocks, filled = layout.some_blocks(), documents.counts().documents > 0
    if blocks and not documents.referenced(blocks):
        if not inside:
            raise DatabaseMismatchError(
                f"{layout.root}: has KV of documents that are not in {where}; name the database that has them, or "
                f"delete {layout.kv}, which is then computed again"
            )
        log.warning("%s: %s; if another database has them, %s", layout.root, _unknown(layout), WAY_OUT)
        return
    if not inside and not blocks and _has_documents(layout):
        raise _mismatch(layout, layout.database.name, where)
    if documents.database.read_only:
        return
    with suppress(StoreBusyError, StoreReadOnlyError):
        _note(layout, NamedDatabase(where, database_id(documents)))
        if filled:
            log.warning(
                "%s: was made before stores named the database of their documents; %s names %s from now on, and "
                "another one is refused", layout.root, layout.marker.name, where,
            )  # fmt: skip


def _note(layout: StoreLayout, database: NamedDatabase) -> None:
    with layout.writer(5.0):
        there = layout.documents_in()  # another process may have been faster
        if there is not None and there.id != database.id:
            raise _mismatch(layout, there.where, database.where)
        layout.note_documents(database)


def _mismatch(layout: StoreLayout, named: str, where: str) -> DatabaseMismatchError:
    if named == where:
        return DatabaseMismatchError(
            f"{layout.root}: its documents are not in {where} any more, or in another schema of it; restore them from "
            "a copy, or make a new store in another directory"
        )
    way_out = "leave out --database" if named == layout.database.name else "name that one"
    return DatabaseMismatchError(f"{layout.root}: its documents are in {named}, not in {where}; {way_out}")


def _unknown(layout: StoreLayout) -> str:
    return f"has KV of documents that are not in its {layout.database.name}"


def _has_documents(layout: StoreLayout) -> bool:
    """Whether there are documents in the directory's SQLite file; a file that cannot be read has none."""
    try:
        with closing(DocumentStore.open(layout.database, read_only=True)) as documents:
            return documents.counts().documents > 0
    except StoreError:
        return False
