"""Types that all bodies share."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StringConstraints
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

MAX_DEPTH = 32
INT64 = 2**63


class RequestModel(BaseModel):
    """Strict: a string is no number. Unknown names are taken here, for `read_json` to name and drop, or refuse."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class LooseModel(BaseModel):
    """Strict, but for fields of the client's own, which are left alone."""

    model_config = ConfigDict(extra="allow", strict=True)


class AnswerModel(BaseModel):
    """Fields that were not set are left out of the JSON."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def of(cls, found: object, **given: Any) -> Self:
        """Fields that are not given are those of an object; what it has not is left out."""
        own = {name: getattr(found, name) for name in cls.model_fields if name not in given and hasattr(found, name)}
        return cls(**own, **given)

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)

    def to_response(self) -> Response:
        return Response(self.to_json(), media_type="application/json")


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("it holds a NUL character; remove it")
    return text


def _plain(value: Any, depth: int = 0) -> Any:
    """Refuse what a store or a method cannot hold: NUL, numbers beyond 64 bits, deep nesting."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        _without_nul(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            _plain(name, depth + 1)
            _plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _plain(item, depth + 1)
    elif isinstance(value, int) and not -INT64 <= value < INT64:
        raise ValueError("it holds a number of more than 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it holds a number that is not finite")
    return value


Text = Annotated[str, AfterValidator(_without_nul)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_without_nul)]
# Checked before pydantic walks it: the walk must not meet what is nested too deep.
JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_plain)]


# OpenAI's error object: every answer that is no success.


class ErrorDetail(AnswerModel):
    message: str = Field(description="What is wrong and how to get out of it")
    type: str = Field(description="invalid_request_error, authentication_error, overloaded_error or server_error")
    param: str | None = Field(description="The part of the request that is meant, such as messages[0].content")
    code: str | None = Field(description="For programs, such as context_length_exceeded")


class ErrorBody(AnswerModel):
    error: ErrorDetail


EVENT_STREAM = "text/event-stream"
# Proxies are not to collect events before they pass them on.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: str, name: str = "") -> bytes:
    """One event. data: one line (JSON)."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


class EventStream(StreamingResponse):
    """A stream of events. Once it has begun, an error can only be told inside of it.

    failed: the error as the last event
    closed: called when the response is over, however it ended, even where it never began
    """

    media_type = EVENT_STREAM

    def __init__(
        self, events: AsyncIterator[bytes], failed: Callable[[Exception], bytes], closed: Callable[[], None]
    ) -> None:
        super().__init__(_ended(events, failed), headers=HEADERS)
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._closed()


async def _ended(events: AsyncIterator[bytes], failed: Callable[[Exception], bytes]) -> AsyncIterator[bytes]:
    try:
        async for one in events:
            yield one
    except Exception as error:
        yield failed(error)
