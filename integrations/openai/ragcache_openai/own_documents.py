"""Views that keep the files of vector stores, which are documents of the store, apart from all other documents.

Only these routes see such files; they check who owns a vector store, and search only in it. All other routes see the
store without them, so that a chat, search, list or deletion there, with any API key, is about the server's own
documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragcache import RagCache
from ragcache.errors import IngestError, MetadataError
from ragcache.store.documents import DocumentStore
from ragcache.store.filters import Filter, compile_filter
from ragcache.store.records import NewChunk, NewDocument, StoredVersion
from ragcache_openai.search import STORE_FIELD

FILES: Filter = {STORE_FIELD: {"$exists": True}}
OTHERS: Filter = {STORE_FIELD: {"$exists": False}}


def without_files(kb: RagCache) -> RagCache:
    """Return a view of the knowledge base without the files in vector stores."""
    return kb.filtered_view(OtherDocuments(kb.store.documents.database))


def only_files_in(kb: RagCache, stores: Sequence[str]) -> RagCache:
    """Return a view of the knowledge base with only the files in these vector stores."""
    inside = {STORE_FIELD: {"$in": list(stores)}}
    return kb.filtered_view(SomeDocuments(kb.store.documents.database, inside))


@dataclass(eq=False, repr=False)
class SomeDocuments(DocumentStore):
    """The documents whose metadata pass a filter."""

    passing: Filter

    def visible(self, where: Filter | None) -> Filter | None:
        return {"$and": [self.passing, where]} if where else self.passing

    def _narrowed(self, query: Any, table: Any) -> Any:
        return query.where(compile_filter(self.passing, table.c.metadata, self.database.dialect, own={}))


@dataclass(eq=False, repr=False)
class OtherDocuments(SomeDocuments):
    """The documents that are not files in vector stores. Documents added through it neither become nor replace such
    files.
    """

    passing: Filter = field(default_factory=lambda: OTHERS, init=False)

    def __post_init__(self) -> None:
        self._all = DocumentStore(self.database)
        self._looked, self._others = (-1, False), (-1, set[int]())  # each with the generation that it belongs to

    def visible(self, where: Filter | None) -> Filter | None:
        """Return `where` itself in a store without such files, so that searches run as without these routes."""
        generation = self.generation()
        if self._looked[0] != generation:
            self._looked = (generation, bool(self._all.documents(FILES, limit=1)))
        return super().visible(where) if self._looked[1] else where

    def vector_ids(self, where: Filter | None = None) -> set[int]:
        """Return the vector ids. The ids of all documents here are cached for each generation, because finding them
        scans all chunks.
        """
        if where is not OTHERS:
            return super().vector_ids(where)
        generation = self.generation()  # read first: at worst the ids are found again
        if self._others[0] != generation:
            self._others = (generation, super().vector_ids(where))
        return self._others[1]

    def replace_document(self, document: NewDocument, new_chunks: Sequence[NewChunk]) -> list[int]:
        """Replace a document. Raises MetadataError for a document with the metadata of such a file, IngestError for
        the id of such a file.
        """
        if STORE_FIELD in document.metadata:
            raise MetadataError(
                f"{document.source or document.id}: the metadata field {STORE_FIELD!r} is the server's own; rename it, "
                "or send the file to /v1/files and attach it to a vector store"
            )
        self._check_id(document.id)
        return super().replace_document(document, new_chunks)

    def move_document(
        self,
        id: str,
        new_id: str,
        version: StoredVersion,
        chunk_ids: Sequence[str],
        metadata: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        self._check_id(new_id)
        return super().move_document(id, new_id, version, chunk_ids, metadata)

    def _check_id(self, id: str) -> None:
        if self.document(id) is None and self._all.document(id) is not None:
            raise IngestError(f"the id {id!r} is that of a file in a vector store; name this document otherwise")
