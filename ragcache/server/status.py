"""Status of the server and the store: /v1/store, /v1/methods, /v1/models, /healthz, /readyz, /metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.responses import Response

from ragcache import RagCache, RagCacheError, methods
from ragcache.errors import StoreUnreachableError
from ragcache.ingest.readers import readers
from ragcache.models.machine import device_failure
from ragcache.server.body import JsonRoute
from ragcache.server.http_errors import ApiError, errors
from ragcache.server.service import Service, ServiceParam, stopping
from ragcache.server.wire import AnswerModel


class ModelItem(AnswerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="Tokens that it reads at once, as vLLM names it; null: not known")


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[ModelItem]


class MethodItem(AnswerModel):
    name: str
    summary: str
    paper: str
    needs_training: bool
    usable: bool = Field(description="Whether this model and this store can run it")


class MethodList(AnswerModel):
    object: Literal["list"]
    data: list[MethodItem]


class StoreFigures(AnswerModel):
    """Counts and bytes, some seconds old at most; hits and misses over the life of the store."""

    model: str
    method: str = Field(description="What requests without a method are read by; auto: each one decides")
    embedder: str
    max_positions: int
    max_upload_bytes: int = Field(description="Largest body of POST /v1/documents")
    max_upload_files: int = Field(description="Files in one upload")
    file_kinds: list[str] = Field(description="Endings of the files that can be read, such as .md")
    documents: int
    chunks: int
    tokens: int
    pending: int
    bytes_by_tier: dict[str, int] = Field(description="Empty for keys without the scope admin, as are hits")
    hits_by_tier: dict[str, int]
    misses: int


class Health(AnswerModel):
    status: Literal["ok", "ready"]


store_router = APIRouter(route_class=JsonRoute, tags=["store"])


@store_router.get("/v1/store", summary="What the store holds", responses=errors())
async def get_store(service: ServiceParam) -> StoreFigures:
    return StoreFigures.of(
        await service.figures_seen(),
        model=service.chat_model,
        method=service.kb.method,
        embedder=service.embedding_model,
        max_positions=service.kb.lm.max_positions,
        max_upload_bytes=service.settings.max_upload_bytes,
        max_upload_files=service.settings.max_upload_files,
        file_kinds=list(readers()),
    )


@store_router.get("/v1/methods", summary="Fusion methods", responses=errors())
async def list_methods(service: ServiceParam) -> MethodList:
    return MethodList(object="list", data=await service.in_thread(_methods, service.kb))


def _methods(kb: RagCache) -> list[MethodItem]:
    return [MethodItem.of(method, usable=_is_usable(kb, method.name)) for method in methods()]


def _is_usable(kb: RagCache, method: str) -> bool:
    """Return whether a method can run. The engine checks that when a stream is made, before anything runs."""
    try:
        kb.stream("?", method=method)
    except RagCacheError:
        return False
    return True


models_router = APIRouter(route_class=JsonRoute, tags=["models"])


@models_router.get("/v1/models", summary="The language model, the embedder and the reranker", responses=errors())
async def list_models(service: ServiceParam) -> ModelList:
    return ModelList(object="list", data=_models(service))


@models_router.get("/v1/models/{id:path}", summary="One model", responses=errors(404))
async def get_model(service: ServiceParam, id: str) -> ModelItem:
    for model in _models(service):
        if model.id == id:
            return model
    raise ApiError(404, f"the model {id!r} is not served here; GET /v1/models lists them", "model_not_found", "id")


def _models(service: Service) -> list[ModelItem]:
    longest, embedded = service.kb.lm.max_positions, getattr(service.kb.embedder, "max_tokens", None)
    known: dict[str | None, int | None] = {service.chat_model: longest, service.plain_model: longest}
    known |= {service.embedding_model: embedded, service.reranking_model: None}
    return [
        ModelItem(id=name, object="model", created=service.created, owned_by="ragcache", max_model_len=tokens)
        for name, tokens in known.items()
        if name is not None
    ]


operation_router = APIRouter(route_class=JsonRoute, tags=["operation"])


def check_device() -> None:
    """Raise ApiError (503) after a device failure that requires a new process."""
    if (failure := device_failure()) is not None:
        raise ApiError(503, failure, "device_failed")


@operation_router.get("/healthz", summary="Whether it can answer at all", responses=errors(503))
async def healthz() -> Health:
    check_device()
    return Health(status="ok")


@operation_router.get("/readyz", summary="Whether it takes questions", responses=errors(503))
async def readyz(service: ServiceParam) -> Health:
    check_device()
    if service.draining:
        raise stopping()
    if not service.warm:
        raise ApiError(503, "the model is warming up", "warming_up", headers={"Retry-After": "1"})
    try:
        await service.in_thread(service.kb.store.documents.generation)
    except StoreUnreachableError as error:
        raise ApiError(
            503, "the database does not answer", "store_unavailable", headers={"Retry-After": "2"}
        ) from error
    return Health(status="ready")


@operation_router.get(
    "/metrics",
    summary="Figures for Prometheus",
    responses={
        200: {"description": "Prometheus's text format", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **errors(),
    },
)
async def metrics(service: ServiceParam) -> Response:
    info = await service.figures.get()
    text = await service.in_thread(service.metrics.render, info, service.kb.rates(), service.kb.load_counts())
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
