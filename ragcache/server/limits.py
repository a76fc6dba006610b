"""Limits of requests: slots for questions, a lock for writers, the size of bodies and the time they take to arrive."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache.errors import StoreBusyError
from ragcache.models.deadline import CALLER
from ragcache.server.http_errors import ApiError


class Slots:
    """Slots for questions that are answered at the same time. The others wait, up to `max_queue`: callers (`CALLER`)
    take turns, and the questions of a caller go in order of arrival.

    most_each: most slots of a caller, so that the others find one free; a caller then has half of the queue at most
    in_use, waiting: how many questions hold a slot, and how many wait
    on_wait: called with the seconds that a question has waited
    """

    on_wait: Callable[[float], None] = staticmethod(lambda _seconds: None)

    def __init__(self, slots: int, max_queue: int, most_each: int | None = None) -> None:
        self.slots = slots
        self.max_queue = max_queue
        self.most_each = most_each or slots
        self.most_waiting = max_queue if self.most_each == slots else -(-max_queue // 2)
        self._held = Counter[str]()
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the caller whose turn is next first

    @property
    def in_use(self) -> int:
        return self._held.total()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a slot. Raises ApiError (503) when the queue, or the caller's part of it, is full."""
        caller, turn = CALLER.get(), asyncio.get_running_loop().create_future()
        waiting, own = self.waiting, len(self._queues.get(caller, ()))
        self._queues.setdefault(caller, deque()).append(turn)
        self._let_in()
        try:
            if not turn.done() and (waiting >= self.max_queue or own >= self.most_waiting):
                raise ApiError(
                    503,
                    f"{self.in_use} questions are being answered and {waiting} wait; ask again later",
                    "queue_full",
                    headers={"Retry-After": "1"},
                )
            started = time.perf_counter()
            await turn
            self.on_wait(time.perf_counter() - started)
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._held[caller] -= 1
                self._held += Counter()  # drops zeros
                self._let_in()
            elif turn in (turns := self._queues.get(caller, deque())):
                turns.remove(turn)
                if not turns:
                    del self._queues[caller]

    def _let_in(self) -> None:
        """Give free slots to the callers whose turn it is."""
        while self.in_use < self.slots:
            caller = next((one for one in self._queues if self._held[one] < self.most_each), None)
            if caller is None:
                return
            turns = self._queues.pop(caller)
            if not (turn := turns.popleft()).done():  # else its question has just been cancelled
                turn.set_result(None)
                self._held[caller] += 1
            if turns:
                self._queues[caller] = turns  # its next question waits after the other callers'


class Writers:
    """A lock for changes of the documents. Waiting changes wait here on the event loop, and block no thread."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._lock = asyncio.Lock()

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


SLOWEST = 16 * 1024
"""Bytes of a body that have to arrive each second, after the first `receive_s` seconds."""


def _limited(receive: Receive, most: int, receive_s: float) -> Receive:
    total, is_whole, started = 0, False, 0.0

    async def limited() -> Message:
        nonlocal total, is_whole, started
        if is_whole:  # only the client's disconnect can follow, at any time
            return await receive()
        now = asyncio.get_running_loop().time()
        started = started or now
        try:
            # Bytes that trickle in extend the time by no more than their number allows.
            async with asyncio.timeout_at(min(now + receive_s, started + receive_s + total / SLOWEST)):
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
    message = f"the body did not arrive within {seconds:g} s and a second for each {SLOWEST} bytes; send it again"
    return ApiError(408, message, "body_timeout", headers={"Connection": "close"})


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {most} bytes; send less at once",
        "request_too_large",
        headers={"Connection": "close"},
    )
