"""Limits of requests: slots for questions, a lock for writers, the size of bodies and the time they take to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache.errors import StoreBusyError
from ragcache.server.http_errors import ApiError


class Slots:
    """Slots for questions that are answered at the same time. The others wait in order of arrival, up to `max_queue`.

    in_use, waiting: how many questions hold a slot, and how many wait
    """

    def __init__(self, slots: int, max_queue: int) -> None:
        self.slots = slots
        self.max_queue = max_queue
        self.in_use = 0
        self.waiting = 0
        self._free = asyncio.Semaphore(slots)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a slot. Raises ApiError (503) when the queue is full."""
        if self._free.locked() and self.waiting >= self.max_queue:
            raise ApiError(
                503,
                f"{self.slots} questions are being answered and {self.waiting} wait; ask again later",
                "queue_full",
                headers={"Retry-After": "1"},
            )
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1
            self._free.release()


class Writers:
    """A lock for changes of the documents. Waiting changes wait here on the event loop, and block no thread."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._lock = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Return whether a change is running."""
        return self._lock.locked()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold the lock. Raises StoreBusyError if another change takes longer than `wait_s`."""
        try:
            async with asyncio.timeout(self.wait_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise StoreBusyError("another change of the documents is under way; send this one again later") from error
        try:
            yield
        finally:
            self._lock.release()


class BodyLimit:
    """Middleware that refuses bodies that are too large or stop arriving. The size is checked by the Content-Length
    header before the body is sent, or else while it arrives.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int, upload_path: str, receive_s: float
    ) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.max_upload_bytes = max_upload_bytes
        self.upload_path = upload_path
        self.receive_s = receive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        is_upload = scope["path"] == self.upload_path or headers.get(b"content-type", b"").startswith(b"multipart/")
        most = self.max_upload_bytes if is_upload else self.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > most:
            await _too_large(most).response(scope)(scope, receive, send)
            return
        await self.app(scope, _limited(receive, most, self.receive_s), send)


def _limited(receive: Receive, most: int, receive_s: float) -> Receive:
    total, is_whole = 0, False

    async def limited() -> Message:
        nonlocal total, is_whole
        if is_whole:  # only the client's disconnect can follow, at any time
            return await receive()
        try:
            async with asyncio.timeout(receive_s):
                message = await receive()
        except TimeoutError as error:
            raise _too_slow(receive_s) from error
        is_whole = not message.get("more_body", False)
        total += len(message.get("body", b""))
        if total > most:
            raise _too_large(most)
        return message

    return limited


def _too_slow(seconds: float) -> ApiError:
    message = f"no part of the body arrived for {seconds:g} s; send it again"
    return ApiError(408, message, "body_timeout", headers={"Connection": "close"})


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {most} bytes; send less at once",
        "request_too_large",
        headers={"Connection": "close"},
    )
