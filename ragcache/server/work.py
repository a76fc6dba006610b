"""Work for a request, in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Generic, TypeVar

from starlette.requests import Request

from ragcache.server.errors import NO_RETRY, OVERLOADED, ApiError, ClientGoneError

T = TypeVar("T")


class RunningTask(Generic[T]):
    """An async generator that runs in its own task and holds a place (a slot, the writer's) while it runs.

    Iterate over it for its items; its errors come out there. The place is free again when the generator is done, when
    the time is up, or when `cancel` is called. `cancel` does not wait: a response that is cut off in mid-sentence
    cannot.
    """

    def __init__(
        self,
        items: AsyncGenerator[T, None],
        place: AbstractAsyncContextManager[None],
        timeout_s: float | None,
        done: Callable[[RunningTask[T]], None],
    ) -> None:
        self._items = items
        self._place = place
        self._timeout_s = timeout_s
        self._queue: asyncio.Queue[tuple[T, None] | tuple[None, Exception]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _task: done(self))

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), self._place, aclosing(self._items):
                async for item in self._items:
                    self._queue.put_nowait((item, None))
            self._queue.put_nowait((None, StopAsyncIteration()))
        except TimeoutError:
            self._queue.put_nowait((None, _too_late(self._timeout_s)))
        except asyncio.CancelledError:
            self._queue.put_nowait((None, stopping()))
            raise
        except Exception as error:
            self._queue.put_nowait((None, error))

    def __aiter__(self) -> RunningTask[T]:
        return self

    async def __anext__(self) -> T:
        item, error = await self._queue.get()
        if error is not None:
            raise error
        return item  # type: ignore[return-value]  # an item comes without an error

    async def last(self) -> T:
        """The last item."""
        found: list[T] = []
        async for item in self:
            found[:] = [item]
        return found[0]

    def cancel(self) -> None:
        self._task.cancel()


async def merged(works: Sequence[RunningTask[T]]) -> AsyncIterator[tuple[int, T]]:
    """The items of all of them as they come, each with its work's rank. Raises what one of them raises."""
    coming = {asyncio.ensure_future(anext(work)): rank for rank, work in enumerate(works)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                rank = coming.pop(one)
                try:
                    item = one.result()
                except StopAsyncIteration:
                    continue
                coming[asyncio.ensure_future(anext(works[rank]))] = rank
                yield rank, item
    finally:
        for one in coming:
            one.cancel()


async def unless_gone(request: Request, wanted: Awaitable[T]) -> T:
    """Wait for a result. Raises ClientGoneError as soon as the client hangs up. The request's body was read before."""
    work = asyncio.ensure_future(wanted)
    watch = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGoneError
        return work.result()
    finally:
        work.cancel()
        watch.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def stopping() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down; ask again in a moment",
        code="shutting_down",
        type=OVERLOADED,
        headers={"Retry-After": "5"},
    )


def _too_late(timeout_s: float | None) -> ApiError:
    return ApiError(
        504,
        f"no answer within {timeout_s:g} s; ask for a shorter one, or when the server has less to do",
        code="request_timeout",
        type=OVERLOADED,
        headers=NO_RETRY,
    )
