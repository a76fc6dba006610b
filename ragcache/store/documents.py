"""Documents, chunks, embeddings and handles in one SQL database."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    FromClause,
    RowMapping,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)

from ragcache.errors import FilterError, NoSuchDocumentError, NotAllowedError
from ragcache.models.deadline import LIMIT
from ragcache.store import rows, text_search
from ragcache.store.chunk_ids import free_chunk_ids
from ragcache.store.collections import EVERYTHING, View, may, within
from ragcache.store.database import Database
from ragcache.store.filters import OWN_FIELDS, Filter, Own, compile_filter, field_names, fields_of
from ragcache.store.orphans import discard_chunks, is_referenced, rescue, to_garbage
from ragcache.store.properties import HELD, held_handles, read_properties, refuse_other
from ragcache.store.records import Chunk, Counts, NewChunk, NewDocument, StoredDocument, StoredVersion, VectorBatch
from ragcache.store.rows import parts_of
from ragcache.store.schema import advance, chunks, current, documents, garbage, properties, searched, windows

ROWS = 1000  # inserted together


@dataclass(eq=False, repr=False)
class DocumentStore:
    """Documents, chunks, embeddings and handles of everything ingested, on SQLite or PostgreSQL.

    Every change is one transaction: after a kill at any instant, finished calls are kept and unfinished calls leave no
    trace. Writers run one at a time and wait for each other; readers never wait. Safe to call from several threads and
    processes; a call in a fork raises ForkedError.

    A change that leaves a handle without a chunk adds it to the garbage in the same transaction. The owner of the KV
    store then deletes the blocks of `collectable()` and calls `clear_garbage` with them: after a kill in between, the
    deletions are done again and none is lost.

    view: the collections that are seen, changed and added to. Documents have ids of their own in each collection, so
          that a view of several may show two with the same id
    """

    database: Database
    view: View = EVERYTHING

    def __post_init__(self) -> None:
        # Each with the generation of the documents that it was found for.
        self._hides: tuple[int | None, bool] = (None, False)  # whether the view hides a document
        self._shown = (-1, set[int]())  # ids of the searched vectors that the view shows

    @classmethod
    def open(cls, url: str | Path, *, read_only: bool = False, busy_timeout_s: float = 30.0) -> Self:
        """Open a database, creating it if it does not exist.

        url: sqlite:///path, postgresql://user@host/name, or the path of a SQLite file

        Raises StoreNotFoundError, SchemaVersionError, StoreReadOnlyError, StoreBusyError, ConfigError.
        """
        return cls(Database(url, read_only=read_only, busy_timeout_s=busy_timeout_s))

    def seen_by(self, view: View) -> Self:
        """Return the same documents, as a view shows them."""
        return replace(self, view=view)

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # Properties: models and settings that the store was made with

    def properties(self) -> dict[str, object]:
        """Return every bound property, and `schema`, the version of the schema."""
        with self.database.read() as connection:
            return read_properties(connection)

    def bind(self, name: str, value: object) -> None:
        """Record a property (JSON) at its first use, and check that later calls pass the same value.

        Raises EmbedderMismatchError, ModelMismatchError or StoreMismatchError, by name. If the store is opened
        read-only and the property is not bound yet, nothing is recorded.
        """
        bound = self.properties()
        if name in bound or self.database.read_only:
            refuse_other(bound.get(name, value), name, value, self.database.where)
            return
        with self.database.write() as connection:
            advance(connection, "generation", 0)
            self._bind(connection, name, value)

    def hold(self, handle: str) -> None:
        """Count a handle as referenced though no chunk has it, such as the handle of the prompts' beginning."""
        self.bind(HELD + handle, True)

    @property
    def basis(self) -> str | None:
        """Return the name of the codec's basis, if the store has a basis."""
        name = self.properties().get("basis")
        return None if name is None else str(name)

    def hold_basis(self, name: str) -> None:
        """Record the codec's basis and count it as referenced though no chunk has it."""
        self.hold(name)
        self.bind("basis", name)

    # Changes

    def replace_document(self, document: NewDocument, new_chunks: Sequence[NewChunk]) -> list[int]:
        """Store a document, replacing a document with the same id. Return the ids of its searched vectors in order: for
        each chunk its own id, or the ids of its windows.

        A chunk id that is taken gets a suffix; see `free_chunk_ids`.

        Raises IngestError (text), MetadataError, DuplicateDocumentError (two chunks with one id), ConfigError or
        EmbedderMismatchError (embeddings), CancelledError or TimedOutError (the current `LIMIT`), StoreBusyError,
        StoreFullError, StoreReadOnlyError, NotAllowedError (a view without a collection to add to); then nothing
        changed.
        """
        document.check(new_chunks)
        _ = self.into
        with self.database.write() as connection:
            advance(connection, "generation")
            return self._replace(connection, document, new_chunks, time.time())

    def move_document(self, id: str, new_id: str, version: StoredVersion, chunk_ids: Sequence[str]) -> list[int]:
        """Change a stored document's id and version, and its chunks' ids in order. Text, embeddings and handles stay.

        A document that already has the new id is deleted. A chunk id that is taken gets a suffix; see
        `free_chunk_ids`.

        Returns the ids of the deleted document's searched vectors. Raises NoSuchDocumentError, and NotAllowedError (a
        view without a collection to add to); then nothing changed.
        """
        NewDocument(new_id, version.source, version.content_hash, file=version.file).check([])
        with self.database.write() as connection:
            advance(connection, "generation")
            return self._move(connection, id, {"id": new_id, **version._asdict()}, chunk_ids)

    def delete_documents(self, ids: Iterable[str]) -> list[str]:
        """Delete documents with their chunks, in all collections that the view may change.

        Returns the ids that existed there, in the order given. Raises StoreReadOnlyError, StoreBusyError.
        """
        wanted = list(dict.fromkeys(ids))
        with self.database.write() as connection:
            advance(connection, "generation", 0)
            found, changed = set[str](), self.view.writes
            for part in parts_of(wanted):
                query = select(documents.c.collection, documents.c.id).where(documents.c.id.in_(part))
                query = query if changed is None else query.where(within(documents.c.collection, changed))
                there = dict[str, list[str]]()
                for collection, id in connection.execute(query):
                    there.setdefault(collection, []).append(id)
                    found.add(id)
                for collection, ids in there.items():
                    discard_chunks(connection, collection, ids)
                    own = and_(documents.c.collection == collection, documents.c.id.in_(ids))
                    connection.execute(delete(documents).where(own))
            if found:
                advance(connection, "generation")
            rescue(connection)
        return [id for id in wanted if id in found]

    def set_handles(self, handles: Mapping[int, str | None]) -> None:
        """Set the handles of chunks, by vector id, in one transaction: of KV computed later (kv="lazy"), or None for
        lost KV. Raises NoSuchDocumentError; then nothing changed."""
        with self.database.write() as connection:
            advance(connection, "generation", 0)
            for id, handle in handles.items():
                to_garbage(connection, chunks.c.vector_id == id)
                changed = connection.execute(update(chunks).where(chunks.c.vector_id == id).values(handle=handle))
                if not changed.rowcount:
                    raise NoSuchDocumentError(f"{self.database.where}: no chunk {id!r}; it may have been deleted")
            rescue(connection)

    # Documents and chunks

    def document(self, id: str) -> StoredDocument | None:
        query = self._narrowed(rows.select_documents().where(documents.c.id == id), documents)
        with self.database.read() as connection:
            row = connection.execute(query.order_by(documents.c.collection)).mappings().first()
        return None if row is None else rows.document(row)

    def documents(
        self, where: Filter | None = None, *, limit: int | None = None, offset: int = 0
    ) -> list[StoredDocument]:
        """Return the documents whose metadata pass the filter, ordered by id. Raises FilterError."""
        query = self._narrowed(rows.select_documents(), documents).order_by(documents.c.id)
        query = query.order_by(documents.c.collection).limit(limit).offset(offset)
        if where:
            query = query.where(self._passing(where))
        with self.database.read() as connection:
            return [rows.document(row) for row in connection.execute(query).mappings()]

    def count(self, where: Filter | None = None) -> int:
        """Count the documents that pass the filter. Raises FilterError."""
        query = self._narrowed(select(func.count()).select_from(documents), documents)
        if where:
            query = query.where(self._passing(where))
        with self.database.read() as connection:
            return int(connection.scalar(query) or 0)

    def versions(self) -> dict[str, StoredVersion]:
        """Return each document's version by id; versions distinguish unchanged from changed input."""
        query = self._narrowed(select(*(documents.c[name] for name in ("id", *StoredVersion._fields))), documents)
        with self.database.read() as connection:
            return {row.id: StoredVersion(*row[1:]) for row in connection.execute(query)}

    def chunks(self, ids: Iterable[str] | None = None, where: Filter | None = None) -> list[Chunk]:
        """Return the chunks that pass the filter: those with the given ids, in that order, or those of all documents,
        ordered by document. Unknown ids are left out. Raises FilterError."""
        if ids is None:
            found = self.chunks_by_vector_ids(self.vector_ids(where))
            return sorted(found, key=lambda chunk: (chunk.document_id, chunk.ordinal))
        found = self._chunks_by(chunks.c.id, list(ids))
        if not where:
            return found
        passing = self.vector_ids(where)
        return [chunk for chunk in found if chunk.vector_id in passing]

    def chunks_by_handle(self, handles: Iterable[str]) -> list[Chunk]:
        """Return a chunk for each of these handles, in their order. If several chunks with the same text share a
        handle, return any of these chunks. A handle that no chunk refers to is left out."""
        return self._chunks_by(chunks.c.handle, list(handles))

    def chunks_of(self, document_id: str, collection: str | None = None) -> list[Chunk]:
        """Return a document's chunks in order; an empty list for an unknown document.

        collection: of the document; None: every collection that the view reads
        """
        query = self._narrowed(rows.select_chunks().where(chunks.c.document_id == document_id), chunks)
        query = query if collection is None else query.where(chunks.c.collection == collection)
        query = query.order_by(chunks.c.collection, chunks.c.ordinal)
        with self.database.read() as connection:
            return [rows.chunk(row) for row in connection.execute(query).mappings()]

    def chunks_by_vector_ids(self, ids: Iterable[int]) -> list[Chunk]:
        """Return the chunks with these vector ids, in their order. Ids that no longer exist are left out."""
        return self._chunks_by(chunks.c.vector_id, [int(id) for id in ids])

    def handles_by_vector_ids(self, ids: Sequence[int]) -> list[str]:
        """Return the handles of these chunks' blocks, in their order. Deleted chunks and chunks without a handle are
        left out."""
        query = self._narrowed(select(chunks.c.vector_id, chunks.c.handle).where(chunks.c.vector_id.in_(ids)), chunks)
        with self.database.read() as connection:
            found = {row.vector_id: row.handle for row in connection.execute(query)}
        return [handle for id in ids if (handle := found.get(id)) is not None]

    def search_text(self, question: str, limit: int, where: Filter | None = None) -> list[int]:
        """Return the vector ids of the chunks that best match the question's words, best first (BM25 on SQLite).

        The first search of a store indexes its texts. Raises FilterError, StoreReadOnlyError if that index cannot be
        written.
        """
        return text_search.search(self.database, question, limit, self.passing(where))

    # The documents that the view shows

    @property
    def into(self) -> str:
        """Return the collection that new documents are added to. Raises NotAllowedError if there is none."""
        name = self.view.into
        if name is not None and may(self.view.writes, name):
            return name
        self.check_changes()
        raise NotAllowedError(f"name the collection to add to: {', '.join(sorted(self.view.writes or ()))}")

    def check_changes(self) -> None:
        """Raise NotAllowedError if the view may change no collection."""
        if self.view.writes is not None and not self.view.writes:
            raise NotAllowedError("this key may change no documents here; use one with the scope 'write' for them")

    def passing(self, where: Filter | None) -> Select[Any] | None:
        """Return a query for the vector ids of the chunks that the view shows and that pass the filter, or None if all
        of the store's chunks are shown and pass. Raises FilterError."""
        if self.shows_all(where):
            return None
        found: Select[Any] = self._narrowed(rows.select_vector_ids(where, self.database.dialect), chunks)
        return found

    def shows_all(self, where: Filter | None = None, generation: int | None = None) -> bool:
        """Return whether the view shows all of the store's documents, and there is no filter.

        generation: of the store, if the caller has just read it; None: it is read
        """
        reads = self.view.reads
        if where or reads is None:
            return not where
        if generation is None or self._hides[0] != generation:
            with self.database.read() as connection:
                generation = current(connection, "generation")
                if self._hides[0] != generation:
                    other = select(documents.c.id).where(~within(documents.c.collection, reads)).limit(1)
                    self._hides = (generation, connection.execute(other).first() is not None)
        return not self._hides[1]

    def _narrowed(self, query: Any, table: Any) -> Any:
        """Return a query over documents or chunks, restricted to those that the view shows."""
        return query if self.view.reads is None else query.where(within(table.c.collection, self.view.reads))

    # Vectors

    def vector_ids(self, where: Filter | None = None) -> set[int]:
        """Return the ids of the searched vectors of all shown chunks whose metadata, including their document's, pass
        the filter. Raises FilterError.

        The ids that a restricted view shows without a filter are kept until a document changes, because finding them
        scans all chunks.
        """
        with self.database.read() as connection:
            generation = current(connection, "generation")
            if not where and self._shown[0] == generation and self.view.reads is not None:
                return self._shown[1]
            own = self._narrowed(rows.select_vector_ids(where, self.database.dialect), chunks)
            found = set(connection.scalars(rows.searched_ids(own)))
        if not where:
            self._shown = (generation, found if self.view.reads is not None else set())
        return found

    def passing_among(self, vector_ids: Collection[int], where: Filter | None) -> Collection[int]:
        """Return those of these vector ids of chunks that pass the filter. Raises FilterError."""
        if not where:
            return vector_ids
        query = self._narrowed(rows.select_vector_ids(where, self.database.dialect), chunks)
        with self.database.read() as connection:
            return set(connection.scalars(query.where(chunks.c.vector_id.in_(vector_ids))))

    def vector_ids_of(self, document_ids: Sequence[str]) -> list[int]:
        """Return the ids of the searched vectors of these documents' chunks in collections that the view may change."""
        with self.database.read() as connection:
            found = list[int]()
            for part in parts_of(document_ids):
                own = select(chunks.c.vector_id).where(chunks.c.document_id.in_(part))
                if self.view.writes is not None:
                    own = own.where(within(chunks.c.collection, self.view.writes))
                found += connection.scalars(rows.searched_ids(own))
            return found

    def chunks_of_vectors(self, vector_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of these vector ids the vector id of its chunk: int64, in the same order.

        An id that is not a window's is the chunk's own id and is returned unchanged.
        """
        query, owners = select(windows.c.vector_id, windows.c.chunk), dict[int, int]()
        with self.database.read() as connection:
            for part in parts_of(vector_ids.tolist()):
                owners.update(map(tuple, connection.execute(query.where(windows.c.vector_id.in_(part)))))
        return np.array([owners.get(id, id) for id in vector_ids.tolist()], np.int64)

    def unknown_fields(self, where: Filter, what: str = "passage") -> tuple[list[str], list[str]]:
        """Return the filter's fields that no passage (or document) has in its metadata, and all existing fields, both
        sorted.

        what: "passage" or "document": whose metadata are looked at
        """
        table = chunks if what == "passage" else documents
        with self.database.read() as connection:
            query = self._narrowed(field_names(table.c.metadata, self.database.dialect), table)
            known = set(connection.scalars(query))
        return sorted(fields_of(where) - known - set(OWN_FIELDS)), sorted(known)

    def refuse_unknown_fields(self, where: Filter, what: str = "passage") -> None:
        """Raise FilterError if the filter, which nothing passes, names a field that no passage (or no document) has.

        Without this check a misspelt field would look like an empty store.

        Nothing is raised for a store without documents, or for fields that begin with _: those belong to a framework,
        which names them whether or not any passage has them.
        """
        found = self.unknown_fields(where, what)
        unknown, shown = ([name for name in names if not name.startswith("_")] for names in found)
        if unknown and self.count():
            raise FilterError(
                f"no {what} has metadata field {' or '.join(map(repr, unknown))}, so none passes the filter; "
                f"fields that {what}s have: {', '.join([*shown[:20], *OWN_FIELDS])}"
            )

    def vectors(self, chunk_ids: Iterable[str], dimension: int) -> NDArray[np.float32]:
        """Return the embeddings of `chunks(chunk_ids)`: float32 [n, dimension].

        dimension: of the embeddings, for the shape of an empty result
        """
        wanted = list(chunk_ids)
        query = self._narrowed(select(chunks.c.id, chunks.c.vector_id, chunks.c.embedding), chunks)
        read = self._matching(query, chunks.c.id, wanted)
        found = dict(zip((row["id"] for row in read), rows.vector_batch(read).vectors, strict=True)) if read else {}
        present = [found[id] for id in wanted if id in found]
        return np.stack(present) if present else np.empty((0, dimension), np.float32)

    def vectors_by_ids(self, vector_ids: NDArray[np.int64], dimension: int) -> VectorBatch:
        """Return the searched vectors with these ids, sorted by id. Ids that are no longer searched are left out.

        dimension: of the vectors, for the shape of an empty result
        """
        return self._searched(searched.c.vector_id, vector_ids.tolist(), dimension)[0]

    def vectors_of(self, chunk_ids: Sequence[int], dimension: int) -> tuple[VectorBatch, NDArray[np.int64]]:
        """Return the searched vectors of the chunks with these vector ids, sorted by id, and each vector's chunk.

        The second result is int64 [n]: the vector id of the chunk that each vector belongs to.
        """
        return self._searched(searched.c.chunk, chunk_ids, dimension)

    def all_vectors(self, *, after: int = 0, batch_size: int = 4096) -> Iterator[VectorBatch]:
        """Yield batches of the searched vectors with an id above `after`, by rising id, from one database state.

        Ids rise from commit to commit: vectors added after an index was built have ids above all of the index's ids.
        Label an index with a `generation()` read before the vectors: the index is then never older than its label.
        """
        return map(rows.vector_batch, self._above(after, batch_size, searched, "embedding"))

    def embeddings(self, *, after: int = 0, batch_size: int = 4096) -> Iterator[VectorBatch]:
        """Yield each chunk's own embedding, batched as in `all_vectors`: the mean of its windows if it has windows."""
        return map(rows.vector_batch, self._above(after, batch_size, chunks, "embedding"))

    def token_ids(self, *, after: int = 0, batch_size: int = 4096) -> Iterator[list[tuple[int, NDArray[np.int32]]]]:
        """Yield vector id and token ids of the chunks with a vector id above `after`, batched as in `all_vectors`."""
        return map(rows.token_id_batch, self._above(after, batch_size, chunks, "token_ids"))

    def _above(self, after: int, batch_size: int, table: FromClause, column: str) -> Iterator[Sequence[RowMapping]]:
        """Yield batches of vector id and `column` from a table's rows with a vector id above `after`; see
        `all_vectors`."""
        last, rest, id = after, True, table.c.vector_id
        with self.database.read() as connection:
            while rest:
                query = select(id, table.c[column]).where(id > last).order_by(id).limit(batch_size)
                query = self._narrowed(query, table) if table is chunks else query
                found = connection.execute(query).mappings().all()
                rest = len(found) == batch_size
                if found:
                    last = found[-1]["vector_id"]
                    yield found

    def generation(self) -> int:
        """Return a number that rises with every commit that changes documents; equal numbers mean equal documents."""
        with self.database.read() as connection:
            return current(connection, "generation")

    # Handles

    def handles(self) -> set[str]:
        """Return every handle that a chunk refers to or that is held."""
        with self.database.read() as connection:
            found = connection.scalars(select(chunks.c.handle).where(chunks.c.handle.is_not(None)).distinct())
            return {*found, *held_handles(connection)}

    def referenced(self, handles: Iterable[str]) -> set[str]:
        """Return those of the given handles that a chunk refers to or that are held."""
        wanted = set(handles)
        with self.database.read() as connection:
            return (wanted & held_handles(connection)) | {
                handle
                for part in parts_of(list(wanted))
                for handle in connection.scalars(select(chunks.c.handle).where(chunks.c.handle.in_(part)).distinct())
            }

    def collectable(self) -> set[str]:
        """Return the dropped handles that no chunk refers to. Delete their KV bytes under the writer lock, with no
        ingestion running."""
        with self.database.read() as connection:
            return set(connection.scalars(select(garbage.c.handle).where(~is_referenced())))

    def clear_garbage(self, handles: Iterable[str]) -> None:
        """Remove handles from the garbage once their KV bytes are deleted; other handles are ignored."""
        with self.database.write() as connection:
            for part in parts_of(list(handles)):
                connection.execute(delete(garbage).where(garbage.c.handle.in_(part)))

    def counts(self) -> Counts:
        with self.database.read() as connection:
            num_documents = connection.scalar(self._narrowed(select(func.count()).select_from(documents), documents))
            query = select(func.count(), func.coalesce(func.sum(chunks.c.num_tokens), 0)).select_from(chunks)
            num_chunks, num_tokens = connection.execute(self._narrowed(query, chunks)).one()
        return Counts(int(num_documents or 0), int(num_chunks), int(num_tokens))

    def _passing(self, where: Filter) -> Any:
        own: Own = {
            "source": lambda passes: passes(documents.c.source),
            "title": lambda passes: passes(documents.c.title),
            "document_id": lambda passes: passes(documents.c.id),
            "chunk_id": lambda passes: exists().where(
                chunks.c.collection == documents.c.collection,
                chunks.c.document_id == documents.c.id,
                passes(chunks.c.id),
            ),
        }
        return compile_filter(where, documents.c.metadata, self.database.dialect, own)

    def _chunks_by(self, column: Column[Any], wanted: Sequence[Any]) -> list[Chunk]:
        if not wanted:  # every question over retrieved passages calls this with nothing to look up
            return []
        found: dict[Any, Chunk] = {}
        with self.database.read() as connection:
            for part in parts_of(wanted):
                query = self._narrowed(rows.select_chunks().where(column.in_(part)), chunks)
                if column is chunks.c.id:  # of equal ids that of the first collection is returned
                    query = query.order_by(chunks.c.collection.desc())
                found.update((row[column.name], rows.chunk(row)) for row in connection.execute(query).mappings())
        return [found[value] for value in wanted if value in found]

    def _searched(
        self, column: ColumnElement[int], wanted: Sequence[int], dimension: int
    ) -> tuple[VectorBatch, NDArray[np.int64]]:
        found = self._matching(select(searched), column, wanted)
        if not found:
            nothing = np.empty(0, np.int64)
            return VectorBatch(nothing, np.empty((0, dimension), np.float32)), nothing
        found.sort(key=lambda row: int(row["vector_id"]))
        return rows.vector_batch(found), np.array([row["chunk"] for row in found], np.int64)

    def _matching(self, query: Select[Any], column: ColumnElement[Any], wanted: Sequence[Any]) -> list[RowMapping]:
        with self.database.read() as connection:
            parts = (connection.execute(query.where(column.in_(part))).mappings() for part in parts_of(wanted))
            return [row for part in parts for row in part]

    def _bind(self, connection: Connection, name: str, value: object) -> None:
        bound = read_properties(connection)
        if name in bound:
            refuse_other(bound[name], name, value, self.database.where)
        else:
            connection.execute(insert(properties), {"name": name, "value": json.dumps(value)})

    def _replace(
        self, connection: Connection, document: NewDocument, new_chunks: Sequence[NewChunk], now: float
    ) -> list[int]:
        into = self.into
        values = {**vars(document), "updated_at": now, "collection": into}
        discard_chunks(connection, into, [document.id])
        own_row = and_(documents.c.collection == into, documents.c.id == document.id)
        if not connection.execute(update(documents).where(own_row).values(values)).rowcount:
            connection.execute(insert(documents), {**values, "created_at": now})
        names = free_chunk_ids(connection, into, document.id, [new.id for new in new_chunks])
        total = len(new_chunks) + sum(len(new.windows) for new in new_chunks)
        first = advance(connection, "vector_id", total) - total + 1
        # The chunks' vector ids are consecutive, which `context_chunks.Preceding` relies on; those of windows follow.
        ids, rest = range(first, first + len(new_chunks)), count(first + len(new_chunks))
        own = [list(islice(rest, len(new.windows))) for new in new_chunks]
        if new_chunks:
            self._bind(connection, "embedding_dim", len(new_chunks[0].embedding))
            named = enumerate(zip(new_chunks, names, ids, strict=True))
            # Inserted in parts: the rows of a long document would otherwise be in memory twice, as chunks and as rows.
            while some := list(islice(named, ROWS)):
                LIMIT.get().check()
                new_rows = [
                    {**rows.chunk_values(document, new, n, id, now), "id": name, "collection": into}
                    for n, (new, name, id) in some
                ]
                connection.execute(insert(chunks), new_rows)
            of_windows = (
                {"vector_id": number, "chunk": id, "embedding": rows.vector_bytes(vector)}
                for new, id, numbers in zip(new_chunks, ids, own, strict=True)
                for number, vector in zip(numbers, new.windows, strict=True)
            )
            while window_rows := list(islice(of_windows, ROWS)):
                connection.execute(insert(windows), window_rows)
        rescue(connection)
        return [number for id, numbers in zip(ids, own, strict=True) for number in numbers or [id]]

    def _move(
        self,
        connection: Connection,
        id: str,
        new: dict[str, Any],
        chunk_ids: Sequence[str],
    ) -> list[int]:
        of = and_(documents.c.collection == self.into, documents.c.id == id)
        old = connection.execute(select(documents).where(of)).mappings().one_or_none()
        if old is None:
            raise NoSuchDocumentError(f"{self.database.where}: no document {id!r}; it may have been deleted")
        if new["id"] == id:
            connection.execute(update(documents).where(of).values(new))
            return []
        taken = and_(documents.c.collection == self.into, documents.c.id == new["id"])
        replaced = select(chunks.c.vector_id).where(chunks.c.collection == self.into, chunks.c.document_id == new["id"])
        gone = list(connection.scalars(rows.searched_ids(replaced)))
        discard_chunks(connection, self.into, [new["id"]])
        connection.execute(delete(documents).where(taken))
        connection.execute(insert(documents), {**old, **new})
        if chunk_ids:
            names = free_chunk_ids(connection, self.into, new["id"], chunk_ids)
            at = (chunks.c.collection == self.into, chunks.c.document_id == id, chunks.c.ordinal == bindparam("at"))
            moved = update(chunks).where(*at).values(id=bindparam("name"), document_id=new["id"])
            connection.execute(moved, [{"at": ordinal, "name": name} for ordinal, name in enumerate(names)])
        connection.execute(delete(documents).where(of))
        rescue(connection)
        return gone
