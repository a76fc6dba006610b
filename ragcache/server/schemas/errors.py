"""OpenAI's error object: every answer that is no success."""

from __future__ import annotations

from pydantic import Field

from ragcache.server.schemas.base import AnswerModel


class ErrorDetail(AnswerModel):
    message: str = Field(description="What is wrong and how to get out of it")
    type: str = Field(description="invalid_request_error, authentication_error, overloaded_error or server_error")
    param: str | None = Field(description="The part of the request that is meant, such as messages[0].content")
    code: str | None = Field(description="For programs, such as context_length_exceeded")


class ErrorBody(AnswerModel):
    error: ErrorDetail
