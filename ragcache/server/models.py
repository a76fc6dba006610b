"""GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache.server.body import JSON
from ragcache.server.errors import ApiError
from ragcache.server.openapi import errors
from ragcache.server.schemas.store import ModelItem, ModelList
from ragcache.server.service import Service, service_of

router = APIRouter(tags=["models"])


@router.get(
    "/v1/models",
    summary="The language model, the embedder and the reranker",
    responses={200: {"model": ModelList}, **errors()},
)
async def list_models(request: Request) -> Response:
    return Response(ModelList(object="list", data=_models(service_of(request))).to_json(), media_type=JSON)


@router.get("/v1/models/{id:path}", summary="One model", responses={200: {"model": ModelItem}, **errors(404)})
async def get_model(request: Request, id: str) -> Response:
    for model in _models(service_of(request)):
        if model.id == id:
            return Response(model.to_json(), media_type=JSON)
    raise ApiError(
        404, f"the model {id!r} is not served here; GET /v1/models lists them", code="model_not_found", param="id"
    )


def _models(service: Service) -> list[ModelItem]:
    known = (service.chat_model, service.embedding_model, service.reranking_model)
    return [
        ModelItem(id=name, object="model", created=service.created, owned_by="ragcache")
        for name in known
        if name is not None
    ]
