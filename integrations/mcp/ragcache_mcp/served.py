"""The tools on a server: their work runs in its slots, within its limits, and is counted in its metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar, cast

from starlette.requests import Request

from ragcache import Answer, Document, IngestReport, RagCache
from ragcache.server.document_routes import add_documents, deletion
from ragcache.server.service import Service, Work, alone
from ragcache_mcp.tools import Tools

T = TypeVar("T")
SEEN: ContextVar[Service] = ContextVar("ragcache_mcp")
"""The service as it is visible to the request that calls a tool."""


class ServedTools(Tools):
    """The tools over the service in `SEEN`."""

    @property
    def service(self) -> Service:
        return SEEN.get()

    def seen(self) -> RagCache:
        return self.service.kb

    async def answered(self, work: Callable[[], Awaitable[T]]) -> T:
        found = await _last(self.service.answer(alone(work)))
        if isinstance(found, Answer):
            self.service.count_answer(found)
        return found

    async def added(self, documents: Sequence[Document]) -> IngestReport:
        report = await _last(self.service.add(add_documents(self.service, documents, split=True)))
        return cast(IngestReport, report)  # the last item of an ingestion

    async def deleted(self, ids: Sequence[str]) -> list[str]:
        """Delete documents. Not cancelled by a client that hangs up: a requested deletion is carried out."""
        return await self.service.change(deletion(self.service, ids)).last()

    def tell(self, error: Exception) -> str:
        return str(self.service.told(error, Request({"type": "http"})).detail)


async def _last(work: Work[T]) -> T:
    """Return the work's result. The work ends if its caller is cancelled."""
    try:
        return await work.last()
    finally:
        work.cancel()
