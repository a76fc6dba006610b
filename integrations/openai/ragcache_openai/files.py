"""/v1/files: files as uploaded, to be attached to vector stores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.concurrency import iterate_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ragcache.server.body import MULTIPART, JsonRoute, check_unknown, content_type, request_body
from ragcache.server.http_errors import ApiError, errors
from ragcache.server.uploads import plain_name
from ragcache.server.wire import AnswerModel
from ragcache_openai.api import After, Caller, CallerParam, Deleted, ListOf, Order
from ragcache_openai.records import Record, new_id
from ragcache_openai.search import ATTACHED, FILE
from ragcache_openai.vector_store_files import delete_indexed, detachment

PURPOSES = ("assistants", "user_data", "batch", "fine-tune", "vision", "evals")
MOST_FILES = 10_000
FilesLimit = Annotated[int, Query(ge=1, le=MOST_FILES)]
FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": list(PURPOSES)}},
}


class FileObject(AnswerModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


router = APIRouter(route_class=JsonRoute, prefix="/v1/files", tags=["files"])


@router.post(
    "",
    summary="Keep a file; what it is good for shows when it is attached to a vector store",
    responses=errors(400, 403, 409, 413, 415, 507),
    openapi_extra=request_body({MULTIPART: FORM}),
)
async def create_file(request: Request, caller: CallerParam) -> FileObject:
    if content_type(request) != MULTIPART:
        raise ApiError(415, f"send the file as Content-Type: {MULTIPART}", "unsupported_media_type")
    async with request.form(max_files=1, max_fields=8) as form:
        upload, purpose = form.get("file"), form.get("purpose")
        _check_names(request, [name for name in form if name not in FORM["properties"]])
        if not isinstance(upload, UploadFile) or not upload.filename:
            raise ApiError(400, "the form has no file in the field 'file'", "missing_required_parameter", "file")
        if purpose not in PURPOSES:
            raise ApiError(400, f"'purpose' is one of {', '.join(PURPOSES)}", "invalid_value", "purpose")
        if not upload.size:
            raise ApiError(400, "the file is empty; send one with text in it", "empty_file", "file")
        body = {"bytes": upload.size, "filename": plain_name(upload.filename), "purpose": purpose}
        file = Record(new_id("file-"), FILE, caller.owner, body, state=purpose)
        [record] = await caller.read(caller.records.add, [file], upload.file)
    return FileObject(**shown(record))


def _check_names(request: Request, unknown: list[str]) -> None:
    """Warn of unknown fields of the form. Raises ApiError (400) if the server is strict, or for an expiry date."""
    if any(name.startswith("expires_after") for name in unknown):
        message = "files do not expire here; leave it out, and delete them"
        raise ApiError(400, message, "unsupported_parameter", "expires_after")
    check_unknown(request, unknown)


@router.get("", summary="The files of this key", responses=errors(400))
async def list_files(
    caller: CallerParam,
    limit: FilesLimit = MOST_FILES,
    order: Order = "desc",
    after: After = None,
    purpose: str | None = None,
) -> ListOf:
    return await caller.list(FILE, shown, limit=limit, order=order, after=after, state=purpose)


@router.get("/{id}", summary="One file", responses=errors(404))
async def get_file(caller: CallerParam, id: str) -> FileObject:
    return FileObject(**shown(await _find(caller, id)))


@router.get(
    "/{id}/content",
    summary="The bytes of a file",
    responses={200: {"content": {"application/octet-stream": {}}}, **errors(404)},
)
async def get_content(caller: CallerParam, id: str) -> Response:
    file = await _find(caller, id)
    parts = iterate_in_threadpool(caller.records.content(file))
    headers = {"Content-Length": str(file.body["bytes"]), "Content-Disposition": "attachment"}
    return StreamingResponse(parts, headers=headers, media_type="application/octet-stream")


@router.delete("/{id}", summary="Delete a file, from all vector stores too", responses=errors(404, 409, 503, 507))
async def delete_file(caller: CallerParam, id: str) -> Deleted:
    file = await _find(caller, id)
    attached = await caller.read(caller.records.ending, ATTACHED, caller.owner, f"/{file.id}")
    deletions = [detachment(caller, one) for one in attached]
    await delete_indexed(caller, deletions, [file.id, *(one.id for one in attached)])
    return Deleted(id=file.id, object="file", deleted=True)


async def _find(caller: Caller, id: str) -> Record:
    return await caller.find(FILE, id, "file", "file_id")


def shown(file: Record) -> dict[str, Any]:
    named = {name: file.body[name] for name in ("bytes", "filename", "purpose")}
    return {"id": file.id, "object": "file", "created_at": int(file.created_at), **named, "status": "processed"}
