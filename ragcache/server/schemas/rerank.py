"""Bodies of POST /v1/rerank."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ragcache.server.schemas.base import AnswerModel, Name, RequestModel, Text


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
