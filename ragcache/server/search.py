"""POST /v1/search: retrieval without an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Hit
from ragcache.server.answering import retrieval
from ragcache.server.body import JSON, read_json, request_body
from ragcache.server.observe import note
from ragcache.server.openapi import errors
from ragcache.server.schemas.search import FoundPassage, SearchRequest, SearchResults
from ragcache.server.service import Service, service_of
from ragcache.server.work import unless_gone

router = APIRouter(tags=["store"])


@router.post(
    "/v1/search",
    summary="Find passages, without an answer",
    responses={200: {"model": SearchResults}, **errors(400, 413, 415, 503, 504)},
    openapi_extra=request_body(json=SearchRequest),
)
async def search(request: Request) -> Response:
    service = service_of(request)
    asked = await read_json(request, SearchRequest)
    work = service.embed(_found(service, asked.query, retrieval(asked, service.settings.answers)))
    try:
        hits = await unless_gone(request, work.last())
    finally:
        work.cancel()
    note(request, passages=len(hits))
    return Response(SearchResults(object="list", data=[_passage(hit) for hit in hits]).to_json(), media_type=JSON)


async def _found(service: Service, query: str, options: dict[str, Any]) -> AsyncGenerator[list[Hit], None]:
    """One item."""
    yield await service.in_thread(partial(service.kb.retrieve, query, **options))


def _passage(hit: Hit) -> FoundPassage:
    chunk = hit.chunk
    return FoundPassage(
        object="passage",
        id=chunk.id,
        document_id=chunk.document_id,
        title=chunk.title,
        source=chunk.source,
        text=chunk.text,
        metadata=chunk.metadata,
        score=float(hit.score),
        handle=hit.handle,
    )
