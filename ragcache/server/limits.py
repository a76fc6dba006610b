"""How much at once: slots for questions, one writer, and how large a request may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache.errors import StoreBusyError
from ragcache.server.http_errors import ApiError


class Slots:
    """So many questions are worked on at the same time, first come first served; the others wait, up to a number.

    in_use, waiting: how many hold a slot, and how many wait for one
    """

    def __init__(self, slots: int, max_queue: int) -> None:
        self.slots = slots
        self.max_queue = max_queue
        self.in_use = 0
        self.waiting = 0
        self._free = asyncio.Semaphore(slots)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Raises ApiError (503) when the queue is full."""
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
    """One change of the documents at a time. The next waits here, on the loop, not in a thread on the store's lock."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._lock = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._lock.locked()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Raises StoreBusyError when another change takes longer than `wait_s`."""
        try:
            async with asyncio.timeout(self.wait_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise StoreBusyError("another change of the documents is under way; send this one again later") from error
        try:
            yield
        finally:
            self._lock.release()


class SizeLimit:
    """Refuses bodies that are too large: by their Content-Length before they are sent, else while they arrive."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int, upload_path: str) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.max_upload_bytes = max_upload_bytes
        self.upload_path = upload_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        is_upload = scope["path"] == self.upload_path or headers.get(b"content-type", b"").startswith(b"multipart/")
        most = self.max_upload_bytes if is_upload else self.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > most:
            await _too_large(most).response(scope)(scope, receive, send)
            return
        await self.app(scope, _counted(receive, most), send)


def _counted(receive: Receive, most: int) -> Receive:
    total = 0

    async def counted() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > most:
            raise _too_large(most)
        return message

    return counted


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {most} bytes; send less at once",
        "request_too_large",
        headers={"Connection": "close"},
    )
