"""Indexing of the files of vector stores, one after another, in the background."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, cast

from ragcache import Document, IngestReport, RagCache
from ragcache.errors import IngestError, NoSuchCollectionError, ReaderError, StoreBusyError
from ragcache.ingest.readers import SourceFile
from ragcache.models.deadline import Limit, limited
from ragcache.server import observe as logs
from ragcache.server.document_routes import add_documents, deletion
from ragcache.server.http_errors import ApiError
from ragcache.server.service import Service
from ragcache.server.uploads import Upload
from ragcache_openai.records import PIECE, Record, Records
from ragcache_openai.search import ATTACHED, ATTRIBUTE, FILE
from ragcache_openai.vector_store_files import CANCELLED, DONE, FAILED, WAITING, inside

PAUSE_S = 1.0
MOST_MESSAGE = 500


@dataclass
class Indexer:
    """Indexes waiting files, oldest first, also those that another server over the store accepted.

    If a server is killed, no file is lost: it goes on waiting. Two servers that index the same file store the same
    documents.

    work: set when files may be waiting to be indexed
    """

    service: Service
    records: Records
    work: asyncio.Event

    async def run(self) -> None:
        """Index files until cancelled, or until the server shuts down."""
        while not self.service.draining:
            self.work.clear()
            try:
                waiting = await self.service.in_thread(self.records.of_state, ATTACHED, WAITING, 1)
                if waiting:
                    await self._index(waiting[0])
                else:
                    await self.work.wait()
            except Exception as error:  # for example, the database is unavailable: the files go on waiting
                logs.write_failure(error)
                await asyncio.sleep(PAUSE_S)

    async def _index(self, file: Record) -> None:
        """Index a file, or record its failure. It goes on waiting if the store is busy or the server shuts down."""
        failure: Exception | None
        try:
            documents, failed = await self._documents(file)
            report = await self.service.add(self._store(file, documents)).last()
            stored, failed = (True, []) if report is None else _outcome(report, failed)
            failure = failed[0] if failed else None
        except (StoreBusyError, ApiError):  # or the server is shutting down, or this hour's tokens are used up
            await asyncio.sleep(PAUSE_S)
            return
        except Exception as error:
            if not isinstance(error, IngestError):
                logs.write_failure(error)
            stored, failure = False, error
        body, state = {**file.body, "error": failure and _told(failure)}, DONE if stored else FAILED
        # `settle` leaves a file as it is that was changed meanwhile, so that it goes on waiting.
        current = await self.service.in_thread(self.records.settle, file, body, state)
        if current is None or current.state == CANCELLED:
            await self._forget(file)

    async def _forget(self, file: Record) -> None:
        """Delete the documents of a file that was detached while it was indexed."""
        while True:
            try:
                await self.service.change(
                    deletion(self.service, where=inside(file), of=await self._stored_in(file))
                ).last()
                return
            except NoSuchCollectionError:  # the vector store was deleted, and its documents with it
                return
            except StoreBusyError:
                await asyncio.sleep(PAUSE_S)

    async def _stored_in(self, file: Record) -> RagCache:
        """Return the collection that is the file's vector store. Raises NoSuchCollectionError if it was deleted."""
        return await self.service.in_thread(partial(self.service.unfiltered.collection, file.parent, create=False))

    async def _documents(self, file: Record) -> tuple[list[Document], list[Exception]]:
        """Return the documents in a file, and errors for its unreadable parts. Raises IngestError if nothing can be
        read.
        """
        left = threading.Event()
        return await self.service.in_thread(self._read, file, left, cancelled=left)

    def _read(self, file: Record, left: threading.Event) -> tuple[list[Document], list[Exception]]:
        original = self.records.get(FILE, file.owner, file.body["file_id"])
        if original is None:
            raise ReaderError(file.body["filename"], "the file was deleted")
        with ExitStack() as stack:
            stack.enter_context(limited(Limit(left)))
            copy = stack.enter_context(SpooledTemporaryFile(PIECE))
            for piece in self.records.content(original):
                copy.write(piece)
            copy.seek(0)
            upload = Upload(file.body["filename"], cast(BinaryIO, copy))
            files, failures = stack.enter_context(self.service.uploads.holding([upload]))
            reader = stack.enter_context(self.service.reader())
            found = [record for one in files for record in reader.read(SourceFile(one.path, file.id, one.source))]
        failed: list[Exception] = [one.error for one in failures]
        failed += [one for one in found if isinstance(one, ReaderError)]
        documents = [one for one in found if isinstance(one, Document)]
        if not documents:
            raise failed[0] if failed else ReaderError(file.body["filename"], "there is no text in it")
        attributes = {ATTRIBUTE + key: value for key, value in file.body["attributes"].items()}
        return [
            replace(
                one,
                id=file.id if len(documents) == 1 else f"{file.id}/{rank:06}",
                source=file.body["filename"],
                metadata={**_own(one.metadata), **attributes},
            )
            for rank, one in enumerate(documents)
        ], failed

    async def _store(self, file: Record, documents: Sequence[Document]) -> AsyncGenerator[IngestReport | None, None]:
        """Store documents and yield the report; yield None if the file no longer waits."""
        current = await self.service.in_thread(self.records.get, ATTACHED, file.owner, file.id)
        if current is None or current.state != WAITING:
            yield None
            return
        adding = add_documents(self.service, documents, split=True, to=await self._stored_in(file))
        async with aclosing(adding):
            async for said in adding:
                if isinstance(said, IngestReport):
                    yield said


def _own(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's own metadata without names of attributes, which are set only when a file is attached."""
    return {name: value for name, value in metadata.items() if not name.startswith(ATTRIBUTE)}


def _outcome(report: IngestReport, failed: Sequence[Exception]) -> tuple[bool, list[Exception]]:
    """Return whether any part of a file was stored, and the errors of the other parts."""
    errors = [*failed, *(one.error for one in report.failed)]
    stored = bool(report.added or report.updated or report.unchanged) or not errors
    if stored and len(errors) > 1:
        errors = [IngestError(f"{len(errors)} parts of the file could not be read; the first: {errors[0]}")]
    return stored, errors


def _told(error: Exception) -> dict[str, str]:
    """Return the `last_error` for an error. An error of the server itself gets a general message."""
    if isinstance(error, IngestError):
        return {"code": "invalid_file", "message": str(error)[:MOST_MESSAGE]}
    return {"code": "server_error", "message": "the server failed; its log says more. Attach the file again"}
