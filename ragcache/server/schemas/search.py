"""Bodies of POST /v1/search."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ragcache.server.schemas.base import AnswerModel, Text
from ragcache.server.schemas.chat import RetrieveFields


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
