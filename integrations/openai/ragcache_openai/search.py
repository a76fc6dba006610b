"""File search: translation of OpenAI's filters to the store's, and the results in vector stores.

A vector store is a collection of the server's store, named by its id, and a file in it is documents whose ids begin
with those of the vector store and the file. A search in vector stores is a retrieval in a view of these collections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ragcache import Chunk, Hit, RagCache, Source
from ragcache.server.http_errors import ApiError
from ragcache.server.wire import INT64, RequestModel, Text
from ragcache.store.collections import VECTOR_STORE, View
from ragcache.store.filters import MAX_CONDITIONS, Filter
from ragcache.store.places import KEYS
from ragcache_openai.api import MOST_PAIRS, Caller, Id, Key, ShortText
from ragcache_openai.records import Record

STORE, FILE, ATTACHED, BATCH = "vector_store", "file", "vector_store.file", "vector_store.files_batch"
"""Kinds of records."""
ATTRIBUTE = "_attributes."
"""Beginning of the metadata fields that hold the attributes of a file in a vector store."""
MOST_RESULTS = 50
MOST_STORES = 100
DEEPEST = 8


def _fits(given: Any) -> Any:
    if isinstance(given, int) and not -INT64 <= given < INT64:
        raise ValueError("it holds a number of more than 64 bits")
    return given


Number = int | float
Value = Annotated[ShortText | bool | Number, BeforeValidator(_fits)]
ListedValue = Annotated[ShortText | Number, BeforeValidator(_fits)]


class Comparison(RequestModel):
    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: Key
    value: Value | Annotated[list[ListedValue], Field(min_length=1, max_length=1000)]


class Compound(RequestModel):
    type: Literal["and", "or"]
    filters: Annotated[list[Filters], Field(min_length=1, max_length=100)]


def _form(given: Any) -> str:
    """Return the form of the filter, so that errors refer to that form."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "Compound" if kind in ("and", "or") else "Comparison"


Filters = Annotated[
    Annotated[Comparison, Tag("Comparison")] | Annotated[Compound, Tag("Compound")], Discriminator(_form)
]
Compound.model_rebuild()


class HybridSearch(RequestModel):
    """Both rankings are fused by reciprocal ranks; a weight of 0 leaves its ranking out."""

    embedding_weight: Annotated[float, Field(ge=0)]
    text_weight: Annotated[float, Field(ge=0)]


class RankingOptions(RequestModel):
    ranker: Text | None = Field(default=None, description="none: leave the server's reranker out")
    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    hybrid_search: HybridSearch | None = None

    def options(self) -> dict[str, Any]:
        """Return the equivalent options of the engine."""
        found: dict[str, Any] = {"rerank": False} if self.ranker == "none" else {}
        if self.score_threshold:
            found["score_threshold"] = self.score_threshold
        if (both := self.hybrid_search) is not None:
            found["search"] = "vector" if not both.text_weight else "hybrid" if both.embedding_weight else "text"
        return found


class FileSearchTool(RequestModel):
    type: Literal["file_search"]
    vector_store_ids: Annotated[list[Id], Field(min_length=1, max_length=MOST_STORES)]
    max_num_results: Annotated[int, Field(ge=1, le=MOST_RESULTS)] | None = None
    filters: Filters | None = None
    ranking_options: RankingOptions | None = None


def translated(filters: Comparison | Compound, param: str, depth: int = 0) -> Filter:
    """Return the store's filter for documents whose attributes pass `filters`. Raises ApiError (400) naming `param`."""
    if not depth and (count := _comparisons(filters)) > MAX_CONDITIONS:
        message = f"filters are {count} comparisons, and {MAX_CONDITIONS} can be made; use 'in' for lists of values"
        raise ApiError(400, message, "invalid_filter", param)
    if isinstance(filters, Compound):
        if depth == DEEPEST:
            raise ApiError(400, f"filters are nested deeper than {DEEPEST}; simplify them", "invalid_filter", param)
        return {f"${filters.type}": [translated(one, param, depth + 1) for one in filters.filters]}
    wants_list = filters.type in ("in", "nin")
    if isinstance(filters.value, list) != wants_list:
        wanted = "a list of values" if wants_list else "one value"
        raise ApiError(400, f"the filter {filters.type!r} of {filters.key!r} takes {wanted}", "invalid_filter", param)
    if isinstance(filters.value, bool) and filters.type not in ("eq", "ne"):
        message = f"the filter {filters.type!r} of {filters.key!r} compares numbers or texts, not true and false"
        raise ApiError(400, message, "invalid_filter", param)
    return {ATTRIBUTE + filters.key: {f"${filters.type}": filters.value}}


def _comparisons(filters: Comparison | Compound) -> int:
    return sum(map(_comparisons, filters.filters)) if isinstance(filters, Compound) else 1


async def check_stores(caller: Caller, ids: Sequence[str], param: str) -> None:
    """Raise ApiError (404) for a vector store that does not exist or is another key's."""
    await caller.among(STORE, ids, "vector store", param)


async def shown_hits(caller: Caller, hits: Iterable[Hit | Source]) -> list[dict[str, Any]]:
    """Return a dict for each hit: file_id, filename, score, attributes and text.

    Hits in a file that was detached from its vector store meanwhile are left out.
    """
    found = [(hit, place) for hit in hits if (place := place_of(hit.chunk)) is not None]
    ids = list(dict.fromkeys(place for _, place in found))
    files: dict[str, Record] = {one.id: one for one in await caller.read(caller.records.among, ids)}
    return [
        {
            "file_id": file.body["file_id"],
            "filename": file.body["filename"],
            "score": float(hit.score),
            "attributes": _with_place(file.body["attributes"], hit.chunk.metadata),
            "text": hit.chunk.text,
        }
        for hit, place in found
        if (file := files.get(place)) is not None
    ]


def _with_place(attributes: dict[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's attributes followed by the passage's place, up to MOST_PAIRS."""
    place = {key: metadata[key] for key in KEYS if key in metadata}
    return dict(list({**attributes, **place, **attributes}.items())[:MOST_PAIRS])


def files_in(kb: RagCache, stores: Iterable[str]) -> RagCache:
    """Return a view of the knowledge base with only the files in these vector stores, which are collections.

    Raises NoSuchCollectionError if a vector store was deleted.
    """
    return kb.seen_by(View(frozenset(stores), frozenset(), None))


def place_of(chunk: Chunk) -> str | None:
    """Return the id of the record that attaches a passage's file to its vector store, or None for another document."""
    store, _, file = chunk.document_id.partition("/")
    return f"{store}/{file.partition('/')[0]}" if store == chunk.collection and store.startswith(VECTOR_STORE) else None
