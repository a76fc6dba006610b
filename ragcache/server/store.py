"""GET /v1/store, /v1/methods."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import RagCache, RagCacheError, methods
from ragcache.ingest.readers import READERS
from ragcache.server.body import JSON
from ragcache.server.openapi import errors
from ragcache.server.schemas.store import MethodItem, MethodList, StoreFigures
from ragcache.server.service import service_of

router = APIRouter(tags=["store"])


@router.get("/v1/store", summary="What the store holds", responses={200: {"model": StoreFigures}, **errors()})
async def get_store(request: Request) -> Response:
    service = service_of(request)
    info = await service.figures.get()
    counted = ("documents", "chunks", "tokens", "pending", "bytes_by_tier", "hits_by_tier", "misses")
    figures = StoreFigures(
        model=service.chat_model,
        method=service.kb.method,
        embedder=service.embedding_model,
        max_positions=service.kb.lm.max_positions,
        max_upload_bytes=service.settings.max_upload_bytes,
        max_upload_files=service.settings.max_upload_files,
        file_kinds=list(READERS),
        **{name: getattr(info, name) for name in counted},
    )
    return Response(figures.to_json(), media_type=JSON)


@router.get("/v1/methods", summary="Fusion methods", responses={200: {"model": MethodList}, **errors()})
async def list_methods(request: Request) -> Response:
    service = service_of(request)
    found = await service.in_thread(_methods, service.kb)
    return Response(MethodList(object="list", data=found).to_json(), media_type=JSON)


def _methods(kb: RagCache) -> list[MethodItem]:
    return [
        MethodItem(
            name=method.name,
            summary=method.summary,
            paper=method.paper,
            needs_training=method.needs_training,
            usable=_is_usable(kb, method.name),
        )
        for method in methods()
    ]


def _is_usable(kb: RagCache, method: str) -> bool:
    """The engine checks a method when a stream is made, before anything runs."""
    try:
        kb.stream("?", method=method)
    except RagCacheError:
        return False
    return True
