"""/v1/documents: add, list, get, delete."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Document as NewDocument
from ragcache import IngestReport
from ragcache.errors import NoSuchDocumentError
from ragcache.server.adding import Said, add_documents, add_uploads, as_events, report_of
from ragcache.server.body import JSON, MULTIPART, content_type, read_json, request_body
from ragcache.server.errors import FAILED, ApiError
from ragcache.server.observe import note
from ragcache.server.openapi import errors, streamed
from ragcache.server.schemas.documents import (
    AddDocuments,
    AddReport,
    ChunkItem,
    DeletedDocument,
    DeletedDocuments,
    DocumentDetail,
    DocumentItem,
    DocumentList,
)
from ragcache.server.service import Service, service_of
from ragcache.server.sse import EVENT_STREAM, EventStream
from ragcache.server.uploads import Upload
from ragcache.server.work import unless_gone
from ragcache.store.filters import MAX_GLOB, Filter
from ragcache.store.records import Chunk, StoredDocument

PATH = "/v1/documents"
MAX_OFFSET = 2**31 - 1
Source = Annotated[
    str | None, Query(max_length=MAX_GLOB, description="Source; * stands for any text, ? for one character")
]
Id = Annotated[str | None, Query(max_length=MAX_GLOB, description="Document id, with * and ? likewise")]
router = APIRouter(tags=["documents"])
FORM = {
    "type": "object",
    "required": ["files"],
    "properties": {
        "files": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}},
    },
}


@router.post(
    PATH,
    summary="Add documents as JSON, or files: text, Markdown, HTML, PDF, JSON lines",
    description=(
        "Embeds the passages and computes their KV. With `Accept: text/event-stream` the answer is events: `progress` "
        "(UploadProgress), then `done` (AddReport) or `error` (ErrorBody)."
    ),
    responses={
        200: streamed(AddReport, "What was stored, and what was not, with the reason"),
        **errors(400, 409, 413, 415, 503, 507),
    },
    openapi_extra=request_body(json=AddDocuments, multipart=FORM),
)
async def create_documents(request: Request) -> Response:
    service = service_of(request)
    work = service.add(await _additions(service, request))
    try:
        first = await unless_gone(request, anext(work))
        if EVENT_STREAM in request.headers.get("accept", ""):
            return EventStream(as_events(service, request, first, work), work.cancel)
        last = first if isinstance(first, IngestReport) else await unless_gone(request, work.last())
    except BaseException:
        work.cancel()
        raise
    return Response(report_of(_report(last, request)).to_json(), media_type=JSON)


async def _additions(service: Service, request: Request) -> AsyncGenerator[Said, None]:
    if content_type(request) == MULTIPART:
        return add_uploads(service, await _files(request, service.settings.max_upload_files))
    asked = await read_json(request, AddDocuments, also=MULTIPART)
    documents = [NewDocument(one.id, one.text, one.metadata, one.title, one.source) for one in asked.documents]
    return add_documents(service, documents, split=asked.split)


async def _files(request: Request, most: int) -> list[Upload]:
    """The files of a form. Raises ApiError (400) where it is none, or holds none."""
    form = await request.form(max_files=most, max_fields=most)
    uploads = [
        Upload(given.filename, given.file)
        for given in form.getlist("files")
        if isinstance(given, UploadFile) and given.filename
    ]
    if not uploads:
        raise ApiError(400, "the form has no file in a field 'files'", code="missing_required_parameter", param="files")
    return uploads


def _report(last: Said, request: Request) -> IngestReport:
    if not isinstance(last, IngestReport):
        raise ApiError(500, "the ingestion ended without a report", code="internal_error", type=FAILED)
    lists = {"added": last.added, "updated": last.updated, "unchanged": last.unchanged}
    note(request, **{name: len(ids) for name, ids in lists.items()}, failed=len(last.failed), tokens=last.tokens)
    return last


@router.get(PATH, summary="Documents by id", responses={200: {"model": DocumentList}, **errors(400)})
async def list_documents(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    source: Source = None,
    id: Id = None,
) -> Response:
    service = service_of(request)
    found, total = await service.in_thread(_page, service, _named(source, id), limit, offset)
    return Response(
        DocumentList(object="list", data=[_item(one) for one in found], total=total).to_json(), media_type=JSON
    )


def _page(service: Service, where: Filter, limit: int, offset: int) -> tuple[list[StoredDocument], int]:
    kb = service.kb
    return kb.documents(where, limit=limit, offset=offset), kb.store.documents.count(where)


def _named(source: str | None, id: str | None) -> Filter:
    given = {"source": source, "document_id": id}
    return {field: {"$glob": pattern} for field, pattern in given.items() if pattern is not None}


@router.delete(
    PATH,
    summary="Delete the documents that match: at least one of the two has to be given",
    responses={200: {"model": DeletedDocuments}, **errors(400, 409, 503, 507)},
)
async def delete_documents(request: Request, source: Source = None, id: Id = None) -> Response:
    where = _named(source, id)
    if not where:
        raise ApiError(
            400,
            "say which documents to delete: source=... or id=...",
            code="missing_required_parameter",
            param="source",
        )
    work = _delete(service_of(request), where=where)
    deleted = await service_of(request).change(work).last()
    return Response(DeletedDocuments(object="list", deleted=deleted or []).to_json(), media_type=JSON)


@router.get(
    PATH + "/{id:path}",
    summary="One document with its passages",
    responses={200: {"model": DocumentDetail}, **errors(404)},
)
async def get_document(request: Request, id: str) -> Response:
    service = service_of(request)
    document, chunks = await service.in_thread(_document, service, _checked(id))
    parts = [ChunkItem(id=one.id, text=one.text, tokens=one.num_tokens, handle=one.handle) for one in chunks]
    return Response(DocumentDetail(**_fields(document), chunks_data=parts).to_json(), media_type=JSON)


def _document(service: Service, id: str) -> tuple[StoredDocument, list[Chunk]]:
    document = service.kb.document(id)
    if document is None:
        raise _absent(id)
    return document, service.kb.chunks_of(id)


@router.delete(
    PATH + "/{id:path}",
    summary="Delete a document: text, embeddings, index entries and KV in every tier",
    responses={200: {"model": DeletedDocument}, **errors(404, 409, 503, 507)},
)
async def delete_document(request: Request, id: str) -> Response:
    service = service_of(request)
    # Not cancelled by a client that hangs up: a deletion that was asked for is done.
    if not await service.change(_delete(service, [_checked(id)])).last():
        raise _absent(id)
    return Response(DeletedDocument(id=id, object="document", deleted=True).to_json(), media_type=JSON)


async def _delete(
    service: Service, ids: Sequence[str] = (), where: Filter | None = None
) -> AsyncGenerator[list[str], None]:
    try:
        yield await service.kb.adelete(ids, filter=where, timeout_s=service.settings.write_wait_s)
    finally:
        service.figures.forget()


def _checked(id: str) -> str:
    """An id that no store can hold is in none."""
    if "\0" in id or not id:
        raise _absent(id)
    return id


def _absent(id: str) -> NoSuchDocumentError:
    return NoSuchDocumentError(f"no document has the id {id!r}; GET {PATH} lists them")


def _item(document: StoredDocument) -> DocumentItem:
    return DocumentItem(**_fields(document))


def _fields(document: StoredDocument) -> dict[str, Any]:
    return {
        "object": "document",
        "id": document.id,
        "title": document.title,
        "source": document.source,
        "chunks": document.num_chunks,
        "tokens": document.num_tokens,
        "state": document.state,
        "created_at": int(document.created_at),
        "metadata": document.metadata,
    }
