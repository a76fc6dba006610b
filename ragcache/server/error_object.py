"""OpenAI's error object, and streams of server-sent events that may end in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from pydantic import Field
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ragcache.server.wire import AnswerModel


class ErrorDetail(AnswerModel):
    message: str = Field(description="What is wrong and how to get out of it")
    type: str = Field(description="invalid_request_error, authentication_error, overloaded_error or server_error")
    param: str | None = Field(description="The part of the request that is meant, such as messages[0].content")
    code: str | None = Field(description="For programs, such as context_length_exceeded")


class ErrorBody(AnswerModel):
    error: ErrorDetail


EVENT_STREAM = "text/event-stream"
# Tells proxies to pass events on at once.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: str, name: str = "") -> bytes:
    """Return a server-sent event. data: a single line (JSON)."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


class EventStream(StreamingResponse):
    """A stream of events. After it has begun, an error can only be sent as an event.

    failed: writes an error as the last event
    closed: called when the response is over, however it ended, even if it never began
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
