"""GET /healthz, /readyz, /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ragcache.server.body import JSON
from ragcache.server.errors import OVERLOADED, ApiError
from ragcache.server.openapi import errors
from ragcache.server.schemas.store import Health
from ragcache.server.service import service_of
from ragcache.server.work import stopping

router = APIRouter(tags=["operation"])


@router.get("/healthz", summary="Whether the process lives", responses={200: {"model": Health}, **errors()})
async def healthz() -> Response:
    return Response(Health(status="ok").to_json(), media_type=JSON)


@router.get("/readyz", summary="Whether it takes questions", responses={200: {"model": Health}, **errors(503)})
async def readyz(request: Request) -> Response:
    service = service_of(request)
    if service.draining:
        raise stopping()
    if not service.warm:
        raise ApiError(503, "the model is warming up", code="warming_up", type=OVERLOADED, headers={"Retry-After": "1"})
    return Response(Health(status="ready").to_json(), media_type=JSON)


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    responses={
        200: {"description": "Prometheus's text format", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **errors(),
    },
)
async def metrics(request: Request) -> Response:
    service = service_of(request)
    info = await service.figures.get()
    text = await service.in_thread(service.metrics.render, info, service.kb.rates(), service.kb.load_counts())
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
