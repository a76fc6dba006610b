"""Calls from an event loop: the work runs in threads and never blocks the loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ragcache.errors import CancelledError, StoreClosedError
from ragcache.forks import Home

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
THREADS = 16
_END = object()


class Threads:
    """A separate thread pool: streams last for seconds and would starve other users of the loop's default pool."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ragcache-async")
        self._closed = False
        self._home = Home("this store was opened", "open it")

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run the function in a thread with the caller's context variables, and return its result.

        If the options have an Event `cancelled`, it is set when the caller's task is cancelled. Raises the function's
        errors, StoreClosedError, ForkedError.
        """
        self._check_open()
        run = partial(contextvars.copy_context().run, function, *args, **options)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, run)
        except asyncio.CancelledError:
            if "cancelled" in options:
                options["cancelled"].set()
            raise

    async def iterate(
        self, function: Callable[..., Iterator[T]], *args: Any, cancelled: threading.Event, **options: Any
    ) -> AsyncIterator[T]:
        """Yield the items of the iterator that the function returns, which runs in a thread.

        `cancelled` is set when the caller stops early. Raises the iterator's errors, StoreClosedError, ForkedError.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[tuple[object, BaseException | None]] = asyncio.Queue()

        def send(item: object, error: BaseException | None = None) -> None:
            try:
                loop.call_soon_threadsafe(items.put_nowait, (item, error))
            except RuntimeError:  # the loop is closed, so the items have no reader
                cancelled.set()

        def produce() -> None:
            try:
                for item in function(*args, cancelled=cancelled, **options):
                    send(item)
            except BaseException as error:
                send(_END, error)
            else:
                send(_END)

        context = contextvars.copy_context()
        running = self._pool.submit(context.run, produce)
        running.add_done_callback(lambda done: send(_END, CancelledError("closed")) if done.cancelled() else None)
        try:
            while True:
                item, error = await items.get()
                if error is not None:
                    raise error
                if item is _END:
                    return
                yield cast(T, item)
        finally:
            cancelled.set()

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _check_open(self) -> None:
        self._home.check()
        if self._closed:
            raise StoreClosedError("this store is closed; open it again")


def threaded(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return an awaitable version of a method, which runs in the object's `Threads`."""
    return _twin(call, Threads.call)


def cancellable(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return an awaitable version of a method that takes `cancelled`: cancelling the task stops the work."""
    return _twin(call, Threads.call, cancels=True)


def streamed(call: Callable[Concatenate[S, P], Iterator[T]]) -> Callable[Concatenate[S, P], AsyncIterator[T]]:
    """Return an async version of a method that returns an iterator: closing the async iterator stops the work."""
    return _twin(call, Threads.iterate, cancels=True)


def _twin(call: Callable[..., Any], run: Callable[..., Any], *, cancels: bool = False) -> Callable[..., Any]:
    @wraps(call)
    def twin(self: Any, *args: Any, **options: Any) -> Any:
        if cancels:
            options["cancelled"] = options.get("cancelled") or threading.Event()
        return run(self._threads, getattr(self, call.__name__), *args, **options)

    twin.__name__ = f"a{call.__name__}"
    return twin
