"""/v1/vector_stores/{id}/file_batches: several files of a vector store, attached together."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator

from ragcache.server.body import JsonRoute
from ragcache.server.http_errors import errors
from ragcache.server.wire import AnswerModel, RequestModel
from ragcache_openai.api import Bounds, Caller, CallerParam, Id, ListOf, absent
from ragcache_openai.records import Record, new_id
from ragcache_openai.search import ATTACHED, BATCH, check_stores
from ragcache_openai.vector_store_files import (
    CANCELLED,
    DONE,
    FAILED,
    MOST_FILES,
    WAITING,
    Attributes,
    Chunking,
    FileCounts,
    FileToAttach,
    State,
    count_files,
    page_of_files,
    records_to_attach,
)


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
        return self.files or [FileToAttach(file_id=id, attributes=self.attributes) for id in self.file_ids or ()]


class FileBatch(AnswerModel):
    id: str
    object: Literal["vector_store.files_batch"]
    created_at: int
    vector_store_id: str
    status: State
    file_counts: FileCounts


router = APIRouter(route_class=JsonRoute, prefix="/v1/vector_stores", tags=["vector stores"])


@router.post("/{id}/file_batches", summary="Attach several files", responses=errors(400, 404, 413, 415, 507))
async def attach_files(caller: CallerParam, id: str, asked: FilesToAttach) -> FileBatch:
    await check_stores(caller, [id], "vector_store_id")
    files = await records_to_attach(caller, id, asked.each(), "file_ids" if asked.file_ids else "files")
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
async def list_batch(
    caller: CallerParam, id: str, batch_id: str, bounds: Bounds, filter: State | None = None
) -> ListOf:
    batch = await _find_batch(caller, id, batch_id)
    return await page_of_files(caller, id, bounds, filter, ids=batch.body["files"])


async def _find_batch(caller: Caller, store: str, id: str) -> Record:
    batch = await caller.find(BATCH, id, "file batch", "batch_id")
    if batch.parent != store:
        raise absent("file batch", id, "batch_id")
    return batch


def _shown_batch(caller: Caller, batch: Record) -> FileBatch:
    counts = count_files(caller.records.states(ATTACHED, batch.parent, batch.body["files"]))
    return FileBatch(
        id=batch.id,
        object="vector_store.files_batch",
        created_at=int(batch.created_at),
        vector_store_id=batch.parent,
        status=next((state for state in (WAITING, CANCELLED, DONE) if getattr(counts, state)), FAILED),
        file_counts=counts,
    )
