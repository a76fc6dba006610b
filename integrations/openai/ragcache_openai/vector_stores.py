"""/v1/vector_stores: collections of files, indexed in the background, and search in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request

from ragcache import Hit
from ragcache.server.body import JsonRoute
from ragcache.server.http_errors import errors
from ragcache.server.wire import AnswerModel, RequestModel, Text
from ragcache_openai import search, vector_store_files
from ragcache_openai.api import Bounds, Caller, CallerParam, Deleted, Id, ListOf, Metadata, ShortText
from ragcache_openai.records import Record, new_id

DEFAULT_RESULTS = 10


def _never(given: Any) -> None:
    if given is not None:
        raise ValueError("vector stores do not expire here; leave it out, and delete them")


Never = Annotated[None, BeforeValidator(_never)]


class NewStore(RequestModel):
    name: ShortText | None = None
    description: ShortText | None = None
    metadata: Metadata | None = None
    file_ids: Annotated[list[Id], Field(max_length=vector_store_files.MOST_FILES)] | None = None
    chunking_strategy: vector_store_files.Chunking | None = None
    expires_after: Never = None


class StoreChange(RequestModel):
    name: ShortText | None = None
    metadata: Metadata | None = None
    expires_after: Never = None


class StoreSearch(RequestModel):
    query: Annotated[Text, Field(min_length=1)] | Annotated[list[Text], Field(min_length=1, max_length=32)]
    max_num_results: Annotated[int, Field(ge=1, le=search.MOST_RESULTS)] = DEFAULT_RESULTS
    filters: search.Filters | None = None
    ranking_options: search.RankingOptions | None = None
    rewrite_query: bool | None = Field(default=None, description="Accepted, and of no consequence here")

    @property
    def queries(self) -> list[str]:
        return [self.query] if isinstance(self.query, str) else self.query


class VectorStore(AnswerModel):
    id: str
    object: Literal["vector_store"]
    created_at: int
    name: str
    description: str | None
    status: Literal["in_progress", "completed"]
    usage_bytes: int = Field(description="Of the indexed files, as they were sent")
    file_counts: vector_store_files.FileCounts
    metadata: dict[str, str]
    expires_after: None = None
    expires_at: None = None
    last_active_at: int


class FoundText(AnswerModel):
    type: Literal["text"]
    text: str


class FoundFile(AnswerModel):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | bool | search.Number]
    content: list[FoundText]


class FoundPage(AnswerModel):
    object: Literal["vector_store.search_results.page"]
    search_query: list[str]
    data: list[FoundFile]
    has_more: bool
    next_page: None


router = APIRouter(route_class=JsonRoute, prefix="/v1/vector_stores", tags=["vector stores"])


@router.post("", summary="Make a vector store, with files if some are named", responses=errors(400, 404, 413, 415, 507))
async def create_store(caller: CallerParam, asked: NewStore) -> VectorStore:
    id = new_id("vs_")
    wanted = [vector_store_files.FileToAttach(file_id=one) for one in asked.file_ids or ()]
    body = {"name": asked.name or "", "description": asked.description, "metadata": asked.metadata or {}}
    files = await vector_store_files.records_to_attach(caller, id, wanted, "file_ids")
    await caller.read(caller.service.unfiltered.collection, id)
    store = (await caller.read(caller.records.add, [Record(id, search.STORE, caller.owner, body), *files]))[0]
    caller.work.set()
    return await caller.read(_shown_store, caller, store)


@router.get("", summary="The vector stores of this key", responses=errors(400))
async def list_stores(caller: CallerParam, bounds: Bounds) -> ListOf:
    return await caller.list(search.STORE, lambda store: _shown_store(caller, store).model_dump(), **bounds)


@router.get("/{id}", summary="One vector store", responses=errors(404))
async def get_store(caller: CallerParam, id: str) -> VectorStore:
    return await caller.read(_shown_store, caller, await _find_store(caller, id))


@router.post("/{id}", summary="Change a vector store's name or metadata", responses=errors(400, 404, 413, 415))
async def change_store(caller: CallerParam, id: str, asked: StoreChange) -> VectorStore:
    store = await _find_store(caller, id)
    changed = {**store.body, **asked.model_dump(exclude_none=True, include={"name", "metadata"})}
    await caller.read(caller.records.change, store.id, changed)
    return await caller.read(_shown_store, caller, store._replace(body=changed))


@router.delete(
    "/{id}",
    summary="Delete a vector store: what was indexed goes, the files stay",
    responses=errors(404, 409, 503, 507),
)
async def delete_store(caller: CallerParam, id: str) -> Deleted:
    store = await _find_store(caller, id)
    await vector_store_files.delete_indexed(
        caller, [partial(caller.service.unfiltered.delete_collection, store.id)], [store.id]
    )
    return Deleted(id=store.id, object="vector_store.deleted", deleted=True)


@router.post(
    "/{id}/search",
    summary="Find passages in a vector store, without an answer",
    responses=errors(400, 404, 413, 415, 503, 504),
)
async def search_store(request: Request, caller: CallerParam, id: str, asked: StoreSearch) -> FoundPage:
    await search.check_stores(caller, [id], "vector_store_id")
    options = asked.ranking_options.options() if asked.ranking_options else {}
    options["filter"] = asked.filters and search.translated(asked.filters, "filters")
    retrieve = (await caller.read(search.files_in, caller.service.unfiltered, [id])).retrieve
    hits = await caller.service.compute(request, _found, retrieve, asked.queries, asked.max_num_results, options)
    return FoundPage(
        object="vector_store.search_results.page",
        search_query=asked.queries,
        data=[_found_file(one) for one in await search.shown_hits(caller, hits)],
        has_more=False,
        next_page=None,
    )


def _found(
    retrieve: Callable[..., list[Hit]], queries: Sequence[str], most: int, options: Mapping[str, Any]
) -> list[Hit]:
    """Return at most `most` hits of any of the queries, each passage once, best first."""
    best: dict[str, Hit] = {}
    for query in queries:
        for hit in retrieve(query, most, **options):
            known = best.get(hit.chunk.id)
            best[hit.chunk.id] = hit if known is None or hit.score > known.score else known
    found = list(best.values())
    return (found if len(queries) == 1 else sorted(found, key=lambda hit: -hit.score))[:most]


async def _find_store(caller: Caller, id: str) -> Record:
    return await caller.find(search.STORE, id, "vector store", "vector_store_id")


def _shown_store(caller: Caller, store: Record) -> VectorStore:
    states = caller.records.states(search.ATTACHED, store.id)
    counts = vector_store_files.count_files(states)
    return VectorStore(
        id=store.id,
        object="vector_store",
        created_at=int(store.created_at),
        **store.body,
        status=vector_store_files.WAITING if counts.in_progress else vector_store_files.DONE,
        usage_bytes=states.get(vector_store_files.DONE, (0, 0))[1],
        file_counts=counts,
        expires_after=None,
        expires_at=None,
        last_active_at=int(store.created_at),
    )


def _found_file(found: Mapping[str, Any]) -> FoundFile:
    named = {name: found[name] for name in ("file_id", "filename", "score", "attributes")}
    return FoundFile(**named, content=[FoundText(type="text", text=found["text"])])
