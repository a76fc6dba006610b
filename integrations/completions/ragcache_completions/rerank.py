"""POST /v1/rerank: scores of given texts by the store's reranker; /v1/search: retrieval without an answer."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request

from ragcache import Hit
from ragcache.server.answers import retrieval
from ragcache.server.body import JsonRoute
from ragcache.server.chat_types import RetrieveFields
from ragcache.server.http_errors import ApiError, errors
from ragcache.server.observe import note
from ragcache.server.service import ServiceParam
from ragcache.server.wire import AnswerModel, LooseModel, Name, RequestModel, Text


class RankedText(LooseModel):
    """A text with fields of the client's own, which are left alone."""

    text: Text


class RerankRequest(RequestModel):
    """A request to rank texts, in the form of Cohere, Jina and vLLM."""

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
    """A ranked text. index: its number among the request's documents, from 0"""

    index: int
    relevance_score: float = Field(description="From 0 to 1: the sigmoid of the model's own score")
    document: RankedDocument | None = None


class RerankResults(AnswerModel):
    id: str
    model: str
    results: list[RerankResult]


router = APIRouter(route_class=JsonRoute, tags=["store"])


@router.post(
    "/v1/rerank",
    summary="Order texts by how well they answer a question",
    responses=errors(400, 404, 413, 415, 503, 504),
)
async def rerank(request: Request, service: ServiceParam, asked: RerankRequest) -> RerankResults:
    reranker = service.kb.retriever.reranker
    if reranker is None:
        raise ApiError(404, "this server has no reranker; start it with --reranker", "model_not_found", "model")
    service.check_model(asked.model, str(service.reranking_model))
    scores = await service.compute(request, reranker.scores, asked.query, asked.texts)
    note(request, texts=len(scores))
    return _ranked(asked, scores)


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


class SearchRequest(RetrieveFields):
    """A question to find passages for, with the fields of `ragcache` in a chat request that concern retrieval."""

    query: Annotated[Text, Field(min_length=1)]


class FoundPassage(AnswerModel):
    """A passage found. score: inner product of the vectors of question and passage, whatever the kind of search"""

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


@router.post("/v1/search", summary="Find passages, without an answer", responses=errors(400, 413, 415, 503, 504))
async def search(request: Request, service: ServiceParam, asked: SearchRequest) -> SearchResults:
    options = retrieval(asked, service.settings.answers)
    hits: list[Hit] = await service.compute(request, partial(service.kb.retrieve, asked.query, **options))
    note(request, passages=len(hits))
    found = [FoundPassage.of(hit.chunk, object="passage", score=float(hit.score), handle=hit.handle) for hit in hits]
    return SearchResults(object="list", data=found)
