"""OpenAI's error object, and streams of server-sent events that may end in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

from pydantic import Field
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

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


HEARTBEAT_S = 15.0
"""Seconds of silence after which a stream sends a comment, so that no proxy closes it while a prompt is read."""


class EventStream(StreamingResponse):
    """A stream of events. After it has begun, an error can only be sent as an event.

    failed: writes an error as the last event
    closed: called when the response is over, however it ended, even if it never began
    """

    media_type = EVENT_STREAM
    heartbeat: ClassVar[bytes] = b": still here\n\n"

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

    async def stream_response(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()

        async def watched(message: Message) -> None:
            nonlocal last
            last = loop.time()
            await send(message)

        async def beat() -> None:
            while True:
                await asyncio.sleep(last + HEARTBEAT_S - loop.time())
                if loop.time() - last >= HEARTBEAT_S:
                    await watched({"type": "http.response.body", "body": self.heartbeat, "more_body": True})

        beating = asyncio.create_task(beat()) if self.heartbeat else None
        try:
            await super().stream_response(watched)
        finally:
            if beating is not None:
                beating.cancel()


async def _ended(events: AsyncIterator[bytes], failed: Callable[[Exception], bytes]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield event
    except Exception as error:
        yield failed(error)
