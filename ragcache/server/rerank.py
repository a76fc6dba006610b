"""POST /v1/rerank: the store's reranker over given texts."""

from __future__ import annotations

import threading
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from ragcache.models.deadline import Limit, limited
from ragcache.retrieval.reranker import Reranker
from ragcache.server.body import JSON, read_json, request_body
from ragcache.server.errors import ApiError
from ragcache.server.observe import note
from ragcache.server.openapi import errors
from ragcache.server.schemas.rerank import RankedDocument, RerankRequest, RerankResult, RerankResults
from ragcache.server.service import Service, service_of
from ragcache.server.work import unless_gone

router = APIRouter(tags=["store"])


@router.post(
    "/v1/rerank",
    summary="Order texts by how well they answer a question",
    responses={200: {"model": RerankResults}, **errors(400, 404, 413, 415, 503, 504)},
    openapi_extra=request_body(json=RerankRequest),
)
async def rerank(request: Request) -> Response:
    service = service_of(request)
    asked = await read_json(request, RerankRequest)
    reranker = service.kb.retriever.reranker
    if reranker is None:
        raise ApiError(
            404, "this server has no reranker; start it with --reranker", code="model_not_found", param="model"
        )
    service.check_model(asked.model, str(service.reranking_model))
    work = service.embed(_scored(service, reranker, asked))
    try:
        scores = await unless_gone(request, work.last())
    finally:
        work.cancel()
    note(request, texts=len(scores))
    return Response(_ranked(asked, scores).to_json(), media_type=JSON)


async def _scored(
    service: Service, reranker: Reranker, asked: RerankRequest
) -> AsyncGenerator[NDArray[np.float32], None]:
    """One item: float32 [len(documents)]."""
    gone = threading.Event()
    yield await service.in_thread(_scores, reranker, asked.query, asked.texts, gone, cancelled=gone)


def _scores(reranker: Reranker, query: str, texts: Sequence[str], gone: threading.Event) -> NDArray[np.float32]:
    with limited(Limit(gone)):
        return reranker.scores(query, texts)


def _ranked(asked: RerankRequest, scores: NDArray[np.float32]) -> RerankResults:
    order = np.argsort(-scores, kind="stable")[: asked.top_n].tolist()
    shares = (1 + np.tanh(scores.astype(np.float64) / 2)) / 2  # the sigmoid, without overflow
    texts = asked.texts
    results = []
    for index in order:
        document: dict[str, Any] = {}
        if asked.return_documents is not False:
            document["document"] = RankedDocument(text=texts[index])
        results.append(RerankResult(index=index, relevance_score=float(shares[index]), **document))
    return RerankResults(id=f"rerank-{uuid.uuid4().hex}", model=asked.model, results=results)
