"""Files in vector stores are documents of the store that belong to these routes: all others see the store without them.

Whose a vector store is, these routes check, and what they find is in it alone. No other route does, so that a chat, a
search, a list or a deletion elsewhere, with whichever API key, is about the server's own documents.
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
    """The knowledge base without the files in vector stores."""
    return kb.filtered_view(OtherDocuments(kb.store.documents.database))


def only_files_in(kb: RagCache, stores: Sequence[str]) -> RagCache:
    """The knowledge base with nothing but the files in these vector stores."""
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
    """The documents that are no files in vector stores. Nothing becomes one through it, or takes a file's place."""

    passing: Filter = field(default_factory=lambda: OTHERS, init=False)

    def __post_init__(self) -> None:
        self._all = DocumentStore(self.database)
        self._looked, self._others = (-1, False), (-1, set[int]())  # of which generation that is

    def visible(self, where: Filter | None) -> Filter | None:
        """`where` itself in a store without such files: the search is as it is without these routes."""
        generation = self.generation()
        if self._looked[0] != generation:
            self._looked = (generation, bool(self._all.documents(FILES, limit=1)))
        return super().visible(where) if self._looked[1] else where

    def vector_ids(self, where: Filter | None = None) -> set[int]:
        """Those of all documents here are looked up once for every change of them: a look goes over all chunks."""
        if where is not OTHERS:
            return super().vector_ids(where)
        generation = self.generation()  # read before: at worst, it is looked again
        if self._others[0] != generation:
            self._others = (generation, super().vector_ids(where))
        return self._others[1]

    def replace_document(self, document: NewDocument, new_chunks: Sequence[NewChunk]) -> list[int]:
        """Raises MetadataError for a document that pretends to be such a file, IngestError for the id of one."""
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
