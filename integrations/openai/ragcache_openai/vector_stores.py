"""/v1/vector_stores: collections of files, indexed in the background, and search in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, JsonValue, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Hit
from ragcache.ingest.readers import readers
from ragcache.server.body import JsonRoute
from ragcache.server.document_routes import deletion
from ragcache.server.http_errors import ApiError, errors
from ragcache.server.wire import AnswerModel, RequestModel, Text
from ragcache.store.filters import Filter
from ragcache_openai.api import (
    MOST_PAIRS,
    Caller,
    CallerParam,
    Deleted,
    Ends,
    Id,
    Key,
    ListOf,
    Metadata,
    ShortText,
    absent,
)
from ragcache_openai.own_documents import only_files_in
from ragcache_openai.records import Record, new_id
from ragcache_openai.search import (
    ATTACHED,
    BATCH,
    FILE,
    FILE_FIELD,
    MOST_RESULTS,
    STORE,
    STORE_FIELD,
    Filters,
    Number,
    RankingOptions,
    Value,
    check_stores,
    shown_hits,
    translated,
)

MOST_FILES = 2000
DEFAULT_RESULTS = 10

State = Literal["in_progress", "completed", "failed", "cancelled"]
WAITING: Literal["in_progress"] = "in_progress"
DONE: Literal["completed"] = "completed"
FAILED: Literal["failed"] = "failed"
CANCELLED: Literal["cancelled"] = "cancelled"
STATES: tuple[State, ...] = (WAITING, DONE, FAILED, CANCELLED)
Attributes = Annotated[dict[Key, Value], Field(max_length=MOST_PAIRS)]


def _never(given: Any) -> None:
    if given is not None:
        raise ValueError("vector stores do not expire here; leave it out, and delete them")


Never = Annotated[None, BeforeValidator(_never)]


class Sizes(RequestModel):
    max_chunk_size_tokens: int
    chunk_overlap_tokens: int


class Chunking(RequestModel):
    """static: only with the sizes that the server's store cuts by."""

    type: Literal["auto", "static"]
    static: Sizes | None = None


class FileToAttach(RequestModel):
    file_id: Id
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


class FilesToAttach(RequestModel):
    file_ids: Annotated[list[Id], Field(min_length=1, max_length=MOST_FILES)] | None = None
    files: Annotated[list[FileToAttach], Field(min_length=1, max_length=MOST_FILES)] | None = None
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None

    @model_validator(mode="after")
    def _names_files(self) -> FilesToAttach:
        if (self.file_ids is None) == (self.files is None):
            raise ValueError("give file_ids or files, one of the two")
        return self

    def each(self) -> list[FileToAttach]:
        return self.files or [
            FileToAttach(file_id=id, attributes=self.attributes, chunking_strategy=self.chunking_strategy)
            for id in self.file_ids or ()
        ]


class NewAttributes(RequestModel):
    attributes: Attributes | None


class NewStore(RequestModel):
    name: ShortText | None = None
    description: ShortText | None = None
    metadata: Metadata | None = None
    file_ids: Annotated[list[Id], Field(max_length=MOST_FILES)] | None = None
    chunking_strategy: Chunking | None = None
    expires_after: Never = None


class StoreChange(RequestModel):
    name: ShortText | None = None
    metadata: Metadata | None = None
    expires_after: Never = None


class StoreSearch(RequestModel):
    query: Annotated[Text, Field(min_length=1)] | Annotated[list[Text], Field(min_length=1, max_length=32)]
    max_num_results: Annotated[int, Field(ge=1, le=MOST_RESULTS)] = DEFAULT_RESULTS
    filters: Filters | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = Field(default=None, description="Accepted, and of no consequence here")

    @property
    def queries(self) -> list[str]:
        return [self.query] if isinstance(self.query, str) else self.query


class FileCounts(AnswerModel):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class VectorStore(AnswerModel):
    id: str
    object: Literal["vector_store"]
    created_at: int
    name: str
    description: str | None
    status: Literal["in_progress", "completed"]
    usage_bytes: int = Field(description="Of the indexed files, as they were sent")
    file_counts: FileCounts
    metadata: dict[str, str]
    expires_after: None = None
    expires_at: None = None
    last_active_at: int


class LastError(AnswerModel):
    code: Literal["server_error", "unsupported_file", "invalid_file"]
    message: str


class StaticSizes(AnswerModel):
    max_chunk_size_tokens: int
    chunk_overlap_tokens: int


class Cut(AnswerModel):
    type: Literal["static"]
    static: StaticSizes


class VectorStoreFile(AnswerModel):
    id: str
    object: Literal["vector_store.file"]
    created_at: int
    vector_store_id: str
    status: State
    last_error: LastError | None
    usage_bytes: int
    attributes: dict[str, str | bool | Number]
    chunking_strategy: Cut


class FileBatch(AnswerModel):
    id: str
    object: Literal["vector_store.files_batch"]
    created_at: int
    vector_store_id: str
    status: State
    file_counts: FileCounts


class FoundText(AnswerModel):
    type: Literal["text"]
    text: str


class FoundFile(AnswerModel):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | bool | Number]
    content: list[FoundText]


class FoundPage(AnswerModel):
    object: Literal["vector_store.search_results.page"]
    search_query: list[str]
    data: list[FoundFile]
    has_more: bool
    next_page: None


router = APIRouter(route_class=JsonRoute, prefix="/v1/vector_stores", tags=["vector stores"])


# Vector stores


@router.post("", summary="Make a vector store, with files if some are named", responses=errors(400, 404, 413, 415, 507))
async def create_store(caller: CallerParam, asked: NewStore) -> VectorStore:
    id = new_id("vs_")
    wanted = [FileToAttach(file_id=one, chunking_strategy=asked.chunking_strategy) for one in asked.file_ids or ()]
    body = {"name": asked.name or "", "description": asked.description, "metadata": asked.metadata or {}}
    files = await _to_attach(caller, id, wanted, "file_ids")
    store = (await caller.read(caller.records.add, [Record(id, STORE, caller.owner, body), *files]))[0]
    caller.work.set()
    return await caller.read(_shown_store, caller, store)


@router.get("", summary="The vector stores of this key", responses=errors(400))
async def list_stores(caller: CallerParam, ends: Ends) -> ListOf:
    return await caller.list(STORE, lambda store: _shown_store(caller, store).model_dump(), **ends)


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
    await delete_indexed(caller, {STORE_FIELD: store.id}, [store.id])
    return Deleted(id=store.id, object="vector_store.deleted", deleted=True)


@router.post(
    "/{id}/search",
    summary="Find passages in a vector store, without an answer",
    responses=errors(400, 404, 413, 415, 503, 504),
)
async def search_store(request: Request, caller: CallerParam, id: str, asked: StoreSearch) -> FoundPage:
    await check_stores(caller, [id], "vector_store_id")
    options = asked.ranking_options.options() if asked.ranking_options else {}
    options["filter"] = asked.filters and translated(asked.filters, "filters")
    retrieve = only_files_in(caller.service.unfiltered, [id]).retrieve
    hits = await caller.service.compute(request, _found, retrieve, asked.queries, asked.max_num_results, options)
    return FoundPage(
        object="vector_store.search_results.page",
        search_query=asked.queries,
        data=[_found_file(one) for one in await shown_hits(caller, hits)],
        has_more=False,
        next_page=None,
    )


def _found(
    retrieve: Callable[..., list[Hit]], queries: Sequence[str], most: int, options: Mapping[str, Any]
) -> list[Hit]:
    """Return hits of any of the queries, each passage once, best first."""
    best: dict[str, Hit] = {}
    for query in queries:
        for hit in retrieve(query, most, **options):
            known = best.get(hit.chunk.id)
            best[hit.chunk.id] = hit if known is None or hit.score > known.score else known
    found = list(best.values())
    return (found if len(queries) == 1 else sorted(found, key=lambda hit: -hit.score))[:most]


# Files in vector stores


@router.post(
    "/{id}/files",
    summary="Attach a file, which is indexed in the background",
    responses=errors(400, 404, 413, 415, 507),
)
async def attach_file(caller: CallerParam, id: str, asked: FileToAttach) -> VectorStoreFile:
    await check_stores(caller, [id], "vector_store_id")
    [file] = await caller.read(caller.records.add, await _to_attach(caller, id, [asked], "file_id"))
    caller.work.set()
    return _file(caller, file)


@router.get("/{id}/files", summary="The files of a vector store", responses=errors(400, 404))
async def list_files(caller: CallerParam, id: str, ends: Ends, filter: State | None = None) -> ListOf:
    await check_stores(caller, [id], "vector_store_id")
    return await _list_files(caller, id, ends, filter)


@router.get("/{id}/files/{file_id}", summary="How far the indexing of a file is", responses=errors(404))
async def get_file(caller: CallerParam, id: str, file_id: str) -> VectorStoreFile:
    return _file(caller, await _find_file(caller, id, file_id))


@router.post(
    "/{id}/files/{file_id}",
    summary="Change the attributes of a file, which is indexed anew; no KV is computed again",
    responses=errors(400, 404, 413, 415),
)
async def change_file(caller: CallerParam, id: str, file_id: str, asked: NewAttributes) -> VectorStoreFile:
    file = await _find_file(caller, id, file_id)
    changed = {**file.body, "attributes": asked.attributes or {}}
    await caller.read(caller.records.change, file.id, changed, WAITING)
    caller.work.set()
    return _file(caller, file._replace(body=changed, state=WAITING))


@router.get(
    "/{id}/files/{file_id}/content",
    summary="What was read in a file, passage by passage",
    responses={200: {"content": {"application/json": {}}}, **errors(404)},
)
async def get_content(caller: CallerParam, id: str, file_id: str) -> Response:
    file = await _find_file(caller, id, file_id)
    texts = await caller.read(_texts, caller, file)
    data: list[dict[str, JsonValue]] = [{"type": "text", "text": text} for text in texts]
    return ListOf(object="list", data=data, first_id=None, last_id=None, has_more=False).to_response()


@router.delete(
    "/{id}/files/{file_id}", summary="Take a file out of a vector store", responses=errors(404, 409, 503, 507)
)
async def detach_file(caller: CallerParam, id: str, file_id: str) -> Deleted:
    file = await _find_file(caller, id, file_id)
    await delete_indexed(caller, inside(file), [file.id])
    return Deleted(id=file_id, object="vector_store.file.deleted", deleted=True)


# Batches of files


@router.post("/{id}/file_batches", summary="Attach several files", responses=errors(400, 404, 413, 415, 507))
async def attach_files(caller: CallerParam, id: str, asked: FilesToAttach) -> FileBatch:
    await check_stores(caller, [id], "vector_store_id")
    files = await _to_attach(caller, id, asked.each(), "file_ids" if asked.file_ids else "files")
    body = {"files": [one.id for one in files]}
    batch = Record(new_id("vsfb_"), BATCH, caller.owner, body, parent=id)
    batch = (await caller.read(caller.records.add, [batch, *files]))[0]
    caller.work.set()
    return await caller.read(_shown_batch, caller, batch)


@router.get("/{id}/file_batches/{batch_id}", summary="How far the indexing of several files is", responses=errors(404))
async def get_batch(caller: CallerParam, id: str, batch_id: str) -> FileBatch:
    return await caller.read(_shown_batch, caller, await _find_batch(caller, id, batch_id))


@router.post(
    "/{id}/file_batches/{batch_id}/cancel",
    summary="Leave out the files that are not indexed yet",
    responses=errors(404),
)
async def cancel_batch(caller: CallerParam, id: str, batch_id: str) -> FileBatch:
    batch = await _find_batch(caller, id, batch_id)
    files = await caller.read(caller.records.among, batch.body["files"])
    for file in files:
        if file.state == WAITING:
            await caller.read(caller.records.change, file.id, state=CANCELLED)
    return await caller.read(_shown_batch, caller, batch)


@router.get("/{id}/file_batches/{batch_id}/files", summary="The files of a batch", responses=errors(400, 404))
async def list_batch(caller: CallerParam, id: str, batch_id: str, ends: Ends, filter: State | None = None) -> ListOf:
    batch = await _find_batch(caller, id, batch_id)
    return await _list_files(caller, id, ends, filter, ids=batch.body["files"])


# Shared functions


async def _find_store(caller: Caller, id: str) -> Record:
    return await caller.find(STORE, id, "vector store", "vector_store_id")


async def _find_file(caller: Caller, store: str, id: str) -> Record:
    await check_stores(caller, [store], "vector_store_id")
    found = await caller.read(caller.records.get, ATTACHED, caller.owner, f"{store}/{id}")
    if found is None:
        raise absent("file", id, "file_id")
    return found


async def _find_batch(caller: Caller, store: str, id: str) -> Record:
    batch = await caller.find(BATCH, id, "file batch", "batch_id")
    if batch.parent != store:
        raise absent("file batch", id, "batch_id")
    return batch


async def _to_attach(caller: Caller, store: str, wanted: Sequence[FileToAttach], param: str) -> list[Record]:
    """Return the records of files to index. Raises ApiError if a file is absent (404), has a kind that cannot be
    read, or asks for other chunk sizes than the store's (400).
    """
    ids = list(dict.fromkeys(one.file_id for one in wanted))
    files = {one.id: one for one in await caller.among(FILE, ids, "file", param)}
    found = []
    for one in {one.file_id: one for one in wanted}.values():
        file = files[one.file_id]
        _check_kind(file.body["filename"], param)
        _check_sizes(caller, one.chunking_strategy)
        body = {**file.body, "file_id": file.id, "attributes": one.attributes or {}}
        found.append(Record(f"{store}/{file.id}", ATTACHED, caller.owner, body, parent=store, state=WAITING))
    return found


def _check_kind(name: str, param: str) -> None:
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in readers():
        message = f"{name}: files of kind {suffix!r} cannot be read; known are {' '.join(readers())}"
        raise ApiError(400, message, "unsupported_file", param)


def _check_sizes(caller: Caller, wanted: Chunking | None) -> None:
    sizes, own = wanted.static if wanted else None, _sizes(caller)
    if sizes is not None and sizes.model_dump() != own.model_dump():
        raise ApiError(
            400,
            f"this server's store is cut into passages of at most {own.max_chunk_size_tokens} tokens that share "
            f"{own.chunk_overlap_tokens}; say so, or leave chunking_strategy out",
            "invalid_value",
            "chunking_strategy",
        )


def _sizes(caller: Caller) -> StaticSizes:
    cut = caller.service.kb.ingestor.chunker.settings
    return StaticSizes(max_chunk_size_tokens=cut["max_tokens"], chunk_overlap_tokens=cut["overlap"])


async def delete_indexed(caller: Caller, documents: Filter | None, ids: Sequence[str]) -> None:
    """Delete documents, then their records, so that an interrupted deletion is found and repeated. A client that
    hangs up does not stop it.
    """

    async def work() -> AsyncGenerator[None, None]:
        if documents is not None:
            async for _ in deletion(caller.service, where=documents, of=caller.service.unfiltered):
                pass
        await caller.read(caller.records.delete, ids)
        yield

    await caller.service.change(work()).last()


def inside(file: Record) -> dict[str, str]:
    """Return the filter for the documents of a file in a vector store."""
    return {STORE_FIELD: file.parent, FILE_FIELD: file.body["file_id"]}


def _texts(caller: Caller, file: Record) -> list[str]:
    kb = caller.service.unfiltered
    return [chunk.text for document in kb.documents(inside(file)) for chunk in kb.chunks_of(document.id)]


async def _list_files(
    caller: Caller, store: str, ends: Mapping[str, Any], state: str | None, ids: Sequence[str] | None = None
) -> ListOf:
    """Return a page of files. A file is listed by its own id; the id of its record has the vector store's before it."""
    own = {name: ends[name] and f"{store}/{ends[name]}" for name in ("after", "before")}
    wanted = {**ends, **own, "parent": store, "state": state, "ids": ids}
    return await caller.list(ATTACHED, lambda file: _file(caller, file).model_dump(), **wanted)


def _counts(states: Mapping[str, tuple[int, int]]) -> FileCounts:
    counted = {state: states.get(state, (0, 0))[0] for state in STATES}
    return FileCounts(**counted, total=sum(counted.values()))


def _shown_store(caller: Caller, store: Record) -> VectorStore:
    states = caller.records.states(ATTACHED, store.id)
    counts = _counts(states)
    return VectorStore(
        id=store.id,
        object="vector_store",
        created_at=int(store.created_at),
        **store.body,
        status=WAITING if counts.in_progress else DONE,
        usage_bytes=states.get(DONE, (0, 0))[1],
        file_counts=counts,
        expires_after=None,
        expires_at=None,
        last_active_at=int(store.created_at),
    )


def _shown_batch(caller: Caller, batch: Record) -> FileBatch:
    counts = _counts(caller.records.states(ATTACHED, batch.parent, batch.body["files"]))
    return FileBatch(
        id=batch.id,
        object="vector_store.files_batch",
        created_at=int(batch.created_at),
        vector_store_id=batch.parent,
        status=next((state for state in (WAITING, CANCELLED, DONE) if getattr(counts, state)), FAILED),
        file_counts=counts,
    )


def _file(caller: Caller, file: Record) -> VectorStoreFile:
    failure = file.body.get("error") if file.state in (FAILED, DONE) else None  # why all of it failed, or a part
    return VectorStoreFile(
        id=file.body["file_id"],
        object="vector_store.file",
        created_at=int(file.created_at),
        vector_store_id=file.parent,
        status=next(state for state in STATES if state == file.state),
        last_error=failure and LastError(**failure),
        usage_bytes=file.body["bytes"],
        attributes=file.body["attributes"],
        chunking_strategy=Cut(type="static", static=_sizes(caller)),
    )


def _found_file(found: Mapping[str, Any]) -> FoundFile:
    named = {name: found[name] for name in ("file_id", "filename", "score", "attributes")}
    return FoundFile(**named, content=[FoundText(type="text", text=found["text"])])
