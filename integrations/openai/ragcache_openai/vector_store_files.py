"""/v1/vector_stores/{id}/files: the files of a vector store, indexed in the background."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, JsonValue
from starlette.responses import Response

from ragcache.errors import NoSuchCollectionError
from ragcache.ingest.readers import kind_problem
from ragcache.server.body import JsonRoute
from ragcache.server.http_errors import ApiError, errors
from ragcache.server.wire import AnswerModel, RequestModel
from ragcache.store.filters import Filter
from ragcache_openai.api import MOST_PAIRS, Bounds, Caller, CallerParam, Deleted, Id, Key, ListOf, absent
from ragcache_openai.records import Record
from ragcache_openai.search import ATTACHED, FILE, Number, Value, check_stores

MOST_FILES = 2000
State = Literal["in_progress", "completed", "failed", "cancelled"]
WAITING: Literal["in_progress"] = "in_progress"
DONE: Literal["completed"] = "completed"
FAILED: Literal["failed"] = "failed"
CANCELLED: Literal["cancelled"] = "cancelled"
STATES: tuple[State, ...] = (WAITING, DONE, FAILED, CANCELLED)
Attributes = Annotated[dict[Key, Value], Field(max_length=MOST_PAIRS)]


class Chunking(RequestModel):
    """How a file is cut into passages: only as the server's store cuts them."""

    type: Literal["auto"]


class FileToAttach(RequestModel):
    file_id: Id
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


class NewAttributes(RequestModel):
    attributes: Attributes | None


class FileCounts(AnswerModel):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class LastError(AnswerModel):
    code: Literal["server_error", "unsupported_file", "invalid_file"]
    message: str


class VectorStoreFile(AnswerModel):
    id: str
    object: Literal["vector_store.file"]
    created_at: int
    vector_store_id: str
    status: State
    last_error: LastError | None
    usage_bytes: int
    attributes: dict[str, str | bool | Number]


router = APIRouter(route_class=JsonRoute, prefix="/v1/vector_stores", tags=["vector stores"])


@router.post(
    "/{id}/files",
    summary="Attach a file, which is indexed in the background",
    responses=errors(400, 404, 413, 415, 507),
)
async def attach_file(caller: CallerParam, id: str, asked: FileToAttach) -> VectorStoreFile:
    await check_stores(caller, [id], "vector_store_id")
    [file] = await caller.read(caller.records.add, await records_to_attach(caller, id, [asked], "file_id"))
    caller.work.set()
    return shown_file(file)


@router.get("/{id}/files", summary="The files of a vector store", responses=errors(400, 404))
async def list_files(caller: CallerParam, id: str, bounds: Bounds, filter: State | None = None) -> ListOf:
    await check_stores(caller, [id], "vector_store_id")
    return await page_of_files(caller, id, bounds, filter)


@router.get("/{id}/files/{file_id}", summary="How far the indexing of a file is", responses=errors(404))
async def get_file(caller: CallerParam, id: str, file_id: str) -> VectorStoreFile:
    return shown_file(await _find_file(caller, id, file_id))


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
    return shown_file(file._replace(body=changed, state=WAITING))


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
    await delete_indexed(caller, [detachment(caller, file)], [file.id])
    return Deleted(id=file_id, object="vector_store.file.deleted", deleted=True)


async def _find_file(caller: Caller, store: str, id: str) -> Record:
    await check_stores(caller, [store], "vector_store_id")
    found = await caller.read(caller.records.get, ATTACHED, caller.owner, f"{store}/{id}")
    if found is None:
        raise absent("file", id, "file_id")
    return found


async def records_to_attach(caller: Caller, store: str, wanted: Sequence[FileToAttach], param: str) -> list[Record]:
    """Return the records of files to index. Raises ApiError if a file is absent (404) or has a kind that cannot be read
    (400).
    """
    ids = list(dict.fromkeys(one.file_id for one in wanted))
    files = {one.id: one for one in await caller.among(FILE, ids, "file", param)}
    found = []
    for one in {one.file_id: one for one in wanted}.values():
        file = files[one.file_id]
        name = file.body["filename"]
        if problem := kind_problem(PurePosixPath(name).suffix.lower()):
            raise ApiError(400, f"{name}: {problem}", "unsupported_file", param)
        body = {**file.body, "file_id": file.id, "attributes": one.attributes or {}}
        found.append(Record(f"{store}/{file.id}", ATTACHED, caller.owner, body, parent=store, state=WAITING))
    return found


async def delete_indexed(caller: Caller, deletions: Sequence[Callable[..., object]], ids: Sequence[str]) -> None:
    """Delete documents, then their records: after an interruption the records are still there, and the client can
    repeat the deletion. A client that hangs up does not stop it.

    deletions: functions that delete documents, called with timeout_s, the seconds to wait for other writers. A vector
               store that was deleted meanwhile is no error
    ids:       of the records
    """

    async def work() -> AsyncGenerator[None, None]:
        for delete in deletions:
            with suppress(NoSuchCollectionError):
                await caller.read(delete, timeout_s=caller.service.settings.write_wait_s)
        caller.service.figures.forget()
        await caller.read(caller.records.delete, ids)
        yield

    await caller.service.change(work()).last()


def inside(file: Record) -> Filter:
    """Return the filter for the documents of a file in a vector store."""
    return {"document_id": {"$glob": f"{file.id}*"}}


def detachment(caller: Caller, file: Record) -> Callable[..., object]:
    """Return a function that deletes the documents of a file in a vector store."""

    def delete(timeout_s: float) -> None:
        store = caller.service.unfiltered.collection(file.parent, create=False)
        store.delete(filter=inside(file), timeout_s=timeout_s)

    return delete


def _texts(caller: Caller, file: Record) -> list[str]:
    kb = caller.service.unfiltered.collection(file.parent, create=False)
    return [chunk.text for document in kb.documents(inside(file)) for chunk in kb.chunks_of(document.id)]


async def page_of_files(
    caller: Caller, store: str, bounds: Mapping[str, Any], state: str | None, ids: Sequence[str] | None = None
) -> ListOf:
    """Return a page of the files of a vector store.

    Clients name a file by its own id. The id of its record is the id of the vector store, a slash and the file's id.
    """
    after = bounds["after"] and f"{store}/{bounds['after']}"
    wanted = {**bounds, "after": after, "parent": store, "state": state, "ids": ids}
    return await caller.list(ATTACHED, lambda file: shown_file(file).model_dump(), **wanted)


def count_files(states: Mapping[str, tuple[int, int]]) -> FileCounts:
    counted = {state: states.get(state, (0, 0))[0] for state in STATES}
    return FileCounts(**counted, total=sum(counted.values()))


def shown_file(file: Record) -> VectorStoreFile:
    # A file that is completed has an error too, if a part of it could not be read.
    failure = file.body.get("error") if file.state in (FAILED, DONE) else None
    return VectorStoreFile(
        id=file.body["file_id"],
        object="vector_store.file",
        created_at=int(file.created_at),
        vector_store_id=file.parent,
        status=next(state for state in STATES if state == file.state),
        last_error=failure and LastError(**failure),
        usage_bytes=file.body["bytes"],
        attributes=file.body["attributes"],
    )
