"""Documents into the store, with what is said on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing

from starlette.requests import Request

from ragcache import Document, IngestReport, ProgressEvent
from ragcache.ingest.readers import SourceFile
from ragcache.server.schemas.documents import AddReport, FailedInput, UploadProgress
from ragcache.server.service import Service
from ragcache.server.sse import event
from ragcache.server.uploads import Upload
from ragcache.server.work import RunningTask

Said = ProgressEvent | IngestReport


async def add_uploads(service: Service, uploads: Sequence[Upload]) -> AsyncGenerator[Said, None]:
    """Progress, then the report."""
    with ExitStack() as stack:
        for upload in uploads:
            stack.callback(upload.file.close)
        holding = service.uploads.holding(uploads)
        files, failures = await service.in_thread(stack.enter_context, holding)
        async with aclosing(add_documents(service, files, split=True)) as adding:
            async for said in adding:
                if isinstance(said, IngestReport):
                    said.failed[:0] = failures
                yield said


async def add_documents(
    service: Service, documents: Sequence[Document | SourceFile], *, split: bool
) -> AsyncGenerator[Said, None]:
    """Progress, then the report. Closed early, the ingestion is cancelled, and waited for; what was committed stays."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[ProgressEvent | None] = asyncio.Queue()
    left = threading.Event()

    def progress(said: ProgressEvent) -> None:
        loop.call_soon_threadsafe(events.put_nowait, said)

    wait_s = service.settings.write_wait_s
    ingestion = asyncio.create_task(
        service.kb.aingest(documents, split=split, progress=progress, timeout_s=wait_s, cancelled=left)
    )
    ingestion.add_done_callback(lambda _done: events.put_nowait(None))
    try:
        while (said := await events.get()) is not None:
            yield said
        yield ingestion.result()
    finally:
        left.set()
        await asyncio.wait([ingestion])
        ingestion.exception()  # told above, or nobody is left to tell
        service.figures.forget()


def report_of(report: IngestReport) -> AddReport:
    failed = [
        FailedInput(source=failure.source, error=str(failure.error), type=type(failure.error).__name__)
        for failure in report.failed
    ]
    same = {name: getattr(report, name) for name in ("added", "updated", "unchanged", "chunks", "tokens")}
    return AddReport(**same, failed=failed)


async def as_events(service: Service, request: Request, first: Said, rest: RunningTask[Said]) -> AsyncIterator[bytes]:
    """progress, progress, ..., done; or error."""
    try:
        yield _event(first)
        async for said in rest:
            yield _event(said)
    except Exception as error:
        yield event(service.told(error, request).body().to_json(), "error")


def _event(said: Said) -> bytes:
    if isinstance(said, IngestReport):
        return event(report_of(said).to_json(), "done")
    return event(UploadProgress(**said._asdict()).to_json(), "progress")
