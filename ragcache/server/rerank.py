"""POST /v1/rerank: the store's reranker over given texts."""

from __future__ import annotations

import threading
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Hit
from ragcache.models.deadline import Limit, limited
from ragcache.retrieval.reranker import Reranker
from ragcache.server.answers import retrieval
from ragcache.server.body import JSON, read_json, request_body
from ragcache.server.chat_types import RetrieveFields
from ragcache.server.http_errors import ApiError, errors
from ragcache.server.observe import note
from ragcache.server.service import Service, service_of, unless_gone
from ragcache.server.wire import AnswerModel, Name, RequestModel, Text

# Bodies of POST /v1/rerank.


class RankedText(BaseModel):
    """A text with fields of the client's own, which are left alone."""

    model_config = ConfigDict(strict=True, extra="allow")

    text: Text


class RerankRequest(RequestModel):
    """The request of Cohere, Jina and vLLM."""

    model: Name
    query: Annotated[Text, Field(min_length=1)]
    documents: Annotated[list[Text | RankedText], Field(min_length=1, max_length=1000)]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(default=None, description="Only the best so many")
    return_documents: bool | None = Field(default=None, description="false: leave the texts out")
    user: Text | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RankedDocument(AnswerModel):
    text: str


class RerankResult(AnswerModel):
    """index: among the request's documents"""

    index: int
    relevance_score: float = Field(description="From 0 to 1: the sigmoid of the model's own score")
    document: RankedDocument | None = None


class RerankResults(AnswerModel):
    id: str
    model: str
    results: list[RerankResult]


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


# Bodies of POST /v1/search.


class SearchRequest(RetrieveFields):
    """A question to find passages for; the other fields are those of `ragcache` in a chat request."""

    query: Annotated[Text, Field(min_length=1)]


class FoundPassage(AnswerModel):
    """score: inner product of question and passage, by whichever way it was found."""

    object: Literal["passage"]
    id: str
    document_id: str
    title: str
    source: str
    text: str
    metadata: dict[str, Any]
    score: float
    handle: str | None


class SearchResults(AnswerModel):
    object: Literal["list"]
    data: list[FoundPassage]


# POST /v1/search: retrieval without an answer.


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
