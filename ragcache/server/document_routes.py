"""/v1/documents: add, list, get, delete."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Document, IngestReport, ProgressEvent, RagCache
from ragcache.errors import NoSuchDocumentError, ReaderError, ReaderLimitError
from ragcache.ingest.report import Failure
from ragcache.models.deadline import Limit, limited
from ragcache.server.body import JSON, MULTIPART, JsonRoute, content_type, read_json, request_body
from ragcache.server.error_object import EVENT_STREAM, EventStream, event
from ragcache.server.http_errors import ApiError, errors, schema_of, streamed
from ragcache.server.observe import note
from ragcache.server.quotas import UPLOAD_TOKENS
from ragcache.server.service import DOCUMENTS, Service, ServiceParam, Work, seen_service
from ragcache.server.uploads import Upload
from ragcache.server.wire import AnswerModel, JsonObject, Name, RequestModel, Text
from ragcache.store.filters import MAX_GLOB, Filter
from ragcache.store.records import Chunk, StoredDocument

Said = ProgressEvent | IngestReport


async def add_uploads(
    service: Service, uploads: Sequence[Upload], *, replace: bool = True
) -> AsyncGenerator[Said, None]:
    """Read uploaded files, then hold the writer's lock and add their documents. Yield progress, then the report."""
    left = threading.Event()
    async with service.reading_slots.hold():
        found = await service.in_thread(_read_uploads, service, uploads, left, cancelled=left)
    documents = [item for item in found if isinstance(item, Document)]
    failures = [item for item in found if isinstance(item, Failure)]
    async with (
        service.writers.hold(),
        aclosing(add_documents(service, documents, split=True, replace=replace)) as adding,
    ):
        async for said in adding:
            if isinstance(said, IngestReport):
                said.failed[:0] = failures
            yield said


def _read_uploads(service: Service, uploads: Sequence[Upload], left: threading.Event) -> list[Document | Failure]:
    """Return the documents in the files, and failures: unreadable files, and texts beyond the size of an upload."""
    most, size, found = service.settings.max_upload_bytes, 0, list[Document | Failure]()
    with ExitStack() as stack:
        for upload in uploads:
            stack.callback(upload.file.close)
        stack.enter_context(limited(Limit(left)))
        files, failures = stack.enter_context(service.uploads.holding(uploads))
        found += failures
        reader = stack.enter_context(service.reader())
        for record in (record for file in files for record in reader.read(file)):
            if isinstance(record, ReaderError):
                found.append(Failure(record.path, record))
                continue
            size += len(record.text)
            if size > most:
                reason = f"the texts of this upload have more than {most:,} characters; send fewer files at once"
                found.append(Failure(record.where, ReaderLimitError(record.where, reason)))
            else:
                found.append(record)
    return found


async def add_documents(
    service: Service, documents: Sequence[Document], *, split: bool, replace: bool = True, to: RagCache | None = None
) -> AsyncGenerator[Said, None]:
    """Add documents. Yield progress, then the report.

    If the generator is closed early, the ingestion is cancelled, and its end is awaited; committed documents stay.

    split: whether to cut documents into passages; False: each document is a passage
    replace: whether a stored document with other content may be replaced
    to: the knowledge base to add to, instead of the view that requests see
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[ProgressEvent | None] = asyncio.Queue()
    left = threading.Event()

    def progress(message: ProgressEvent) -> None:
        loop.call_soon_threadsafe(events.put_nowait, message)

    ingestion = asyncio.create_task(
        (to or service.kb).aingest(
            documents,
            split=split,
            replace=replace,
            progress=progress,
            timeout_s=service.settings.write_wait_s,
            cancelled=left,
            limits=service.addition_limits(),
        )
    )
    ingestion.add_done_callback(lambda _done: events.put_nowait(None))
    try:
        while (said := await events.get()) is not None:
            yield said
        service.quotas.charge(UPLOAD_TOKENS, ingestion.result().tokens)
        yield ingestion.result()
    finally:
        left.set()
        await asyncio.wait([ingestion])
        ingestion.exception()  # mark it as retrieved: it was raised above, or the caller is closed
        service.figures.forget()


def report_of(report: IngestReport) -> AddReport:
    failed = [
        FailedInput(source=failure.source, error=str(failure.error), type=type(failure.error).__name__)
        for failure in report.failed
    ]
    return AddReport.of(report, failed=failed)


async def as_events(first: Said, rest: Work[Said]) -> AsyncIterator[bytes]:
    """Yield the events: progress, progress, ..., done."""
    yield _event(first)
    async for _, message in rest:
        yield _event(message)


def _event(message: Said) -> bytes:
    if isinstance(message, IngestReport):
        return event(report_of(message).to_json(), "done")
    return event(UploadProgress.of(message).to_json(), "progress")


class AddedDocument(RequestModel):
    id: Name = Field(description="Adding the same id again replaces the document")
    text: Text
    metadata: JsonObject = Field(default_factory=dict)
    title: Text = ""
    source: Text = ""


class AddDocuments(RequestModel):
    documents: Annotated[list[AddedDocument], Field(min_length=1, max_length=10_000)]
    split: bool = Field(True, description="false: each document is one passage, exactly as it is")
    collection: Name | None = Field(default=None, description="Where they go; it is made if it is not there")


class FailedInput(AnswerModel):
    source: str
    error: str = Field(description="Why it was not stored")
    type: str = Field(description="The error's class")


class AddReport(AnswerModel):
    """Report of an addition. Inputs that could not be stored are named; the others are stored."""

    added: list[str] = Field(description="Ids of new documents")
    updated: list[str] = Field(description="Ids of replaced documents")
    unchanged: list[str] = Field(description="Ids of documents that were there already")
    failed: list[FailedInput]
    chunks: int = Field(description="Passages stored")
    tokens: int


class UploadProgress(AnswerModel):
    """An event of an upload: `read` counts inputs, `embed` passages, `encode` tokens, `commit` documents."""

    stage: str
    done: int
    total: int
    item: str


class DocumentItem(AnswerModel):
    object: Literal["document"]
    id: str
    collection: str
    title: str
    source: str
    chunks: int
    tokens: int
    state: Literal["ready", "pending"] = Field(description="pending: some KV is computed on first use")
    created_at: int = Field(description="Unix seconds")
    metadata: dict[str, Any]


class ChunkItem(AnswerModel):
    id: str
    text: str
    tokens: int
    handle: str | None


class DocumentDetail(DocumentItem):
    chunks_data: list[ChunkItem]


class DocumentList(AnswerModel):
    object: Literal["list"]
    data: list[DocumentItem]
    total: int = Field(description="Documents in the store that match, whatever the limit")


class DeletedDocuments(AnswerModel):
    object: Literal["list"]
    deleted: list[str] = Field(description="Ids of the documents that matched")


class DeletedDocument(AnswerModel):
    id: str
    object: Literal["document"]
    deleted: Literal[True]


PATH = DOCUMENTS
MAX_OFFSET = 2**31 - 1
Source = Annotated[
    str | None, Query(max_length=MAX_GLOB, description="Source; * stands for any text, ? for one character")
]
Id = Annotated[str | None, Query(max_length=MAX_GLOB, description="Document id, with * and ? likewise")]
Replace = Annotated[
    bool, Query(description="Whether a file replaces a document of its name; else it fails where the texts differ")
]
router = APIRouter(route_class=JsonRoute, prefix=PATH, tags=["documents"])
FORM = {
    "type": "object",
    "required": ["files"],
    "properties": {"files": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}},
}


@router.post(
    "",
    summary="Add documents as JSON, or files: text, Markdown, HTML, PDF, JSON lines",
    description=(
        "Embeds the passages and computes their KV. With `Accept: text/event-stream` the answer is events: `progress` "
        "(UploadProgress), then `done` (AddReport) or `error` (ErrorBody)."
    ),
    responses={
        200: streamed(AddReport, "What was stored, and what was not, with the reason", UploadProgress),
        **errors(400, 409, 413, 415, 503, 507),
    },
    openapi_extra=request_body({JSON: schema_of(AddDocuments), MULTIPART: FORM}),
)
async def create_documents(request: Request, service: ServiceParam, replace: Replace = False) -> Response:
    is_form = content_type(request) == MULTIPART  # its files are read before the writer's lock is held
    work = service.add(await _additions(request, service, replace), holds=not is_form)
    _, first = await work.unless_gone(request, anext(work))
    if EVENT_STREAM in request.headers.get("accept", ""):

        def failed(error: Exception) -> bytes:
            return event(service.told(error, request).body().to_json(), "error")

        return EventStream(as_events(first, work), failed, work.cancel)
    last = first if isinstance(first, IngestReport) else await work.unless_gone(request, work.last())
    return report_of(_report(last, request)).to_response()


async def _additions(request: Request, service: Service, replace: bool) -> AsyncGenerator[Said, None]:
    if content_type(request) == MULTIPART:
        return add_uploads(service, await _files(request, service.settings.max_upload_files), replace=replace)
    body = await read_json(request, AddDocuments, f"{JSON} or {MULTIPART}")
    documents = [Document(item.id, item.text, item.metadata, item.title, item.source) for item in body.documents]
    return add_documents(await seen_service(request), documents, split=body.split)


async def _files(request: Request, most: int) -> list[Upload]:
    """Return the files of a form. Raises ApiError (400) if there is no form or no file."""
    form = await request.form(max_files=most, max_fields=most)
    uploads = [
        Upload(field.filename, field.file)
        for field in form.getlist("files")
        if isinstance(field, UploadFile) and field.filename
    ]
    if not uploads:
        raise ApiError(400, "the form has no file in a field 'files'", "missing_required_parameter", "files")
    return uploads


def _report(last: Said, request: Request) -> IngestReport:
    if not isinstance(last, IngestReport):
        raise ApiError(500, "the ingestion ended without a report", "internal_error")
    lists = {"added": last.added, "updated": last.updated, "unchanged": last.unchanged}
    note(request, **{name: len(ids) for name, ids in lists.items()}, failed=len(last.failed), tokens=last.tokens)
    return last


@router.get("", summary="Documents by id", responses=errors(400))
async def list_documents(
    service: ServiceParam,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    source: Source = None,
    id: Id = None,
) -> DocumentList:
    found, total = await service.in_thread(_page, service, _named(source, id), limit, offset)
    data = [DocumentItem.of(document, **_fields(document)) for document in found]
    return DocumentList(object="list", data=data, total=total)


def _page(service: Service, where: Filter, limit: int, offset: int) -> tuple[list[StoredDocument], int]:
    kb = service.kb
    return kb.documents(where, limit=limit, offset=offset), kb.store.documents.count(where)


def _named(source: str | None, id: str | None) -> Filter:
    values = {"source": source, "document_id": id}
    return {field: {"$glob": pattern} for field, pattern in values.items() if pattern is not None}


@router.delete(
    "",
    summary="Delete the documents that match: at least one of the two has to be given",
    responses=errors(400, 409, 503, 507),
)
async def delete_documents(service: ServiceParam, source: Source = None, id: Id = None) -> DeletedDocuments:
    where = _named(source, id)
    if not where:
        raise ApiError(
            400, "say which documents to delete: source=... or id=...", "missing_required_parameter", "source"
        )
    deleted = await service.change(deletion(service, where=where)).last()
    return DeletedDocuments(object="list", deleted=deleted or [])


@router.get("/{id:path}", summary="One document with its passages", responses=errors(404))
async def get_document(service: ServiceParam, id: str) -> DocumentDetail:
    document, chunks = await service.in_thread(_document, service, _checked(id))
    parts = [ChunkItem.of(chunk, tokens=chunk.num_tokens) for chunk in chunks]
    return DocumentDetail.of(document, **_fields(document), chunks_data=parts)


def _document(service: Service, id: str) -> tuple[StoredDocument, list[Chunk]]:
    document = service.kb.document(id)
    if document is None:
        raise _absent(id)
    return document, service.kb.chunks_of(id)


@router.delete(
    "/{id:path}",
    summary="Delete a document: text, embeddings, index entries and KV in every tier",
    responses=errors(404, 409, 503, 507),
)
async def delete_document(service: ServiceParam, id: str) -> DeletedDocument:
    # A client that hangs up does not cancel this: a requested deletion is carried out.
    if not await service.change(deletion(service, [_checked(id)])).last():
        raise _absent(id)
    return DeletedDocument(id=id, object="document", deleted=True)


async def deletion(
    service: Service, ids: Sequence[str] = (), where: Filter | None = None, of: RagCache | None = None
) -> AsyncGenerator[list[str], None]:
    """Delete documents and yield their ids, for `Service.change`.

    of: the knowledge base to delete from, instead of the view that requests see
    """
    try:
        yield await (of or service.kb).adelete(ids, filter=where, timeout_s=service.settings.write_wait_s)
    finally:
        service.figures.forget()


def _checked(id: str) -> str:
    """Return an id. Raises NoSuchDocumentError for an id that no store can hold."""
    if "\0" in id or not id:
        raise _absent(id)
    return id


def _absent(id: str) -> NoSuchDocumentError:
    return NoSuchDocumentError(f"no document has the id {id!r}; GET {PATH} lists them")


def _fields(document: StoredDocument) -> dict[str, Any]:
    """Return the fields that have another name or type in a response."""
    counts = {"chunks": document.num_chunks, "tokens": document.num_tokens}
    return {"object": "document", **counts, "created_at": int(document.created_at)}
