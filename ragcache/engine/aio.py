"""Asking from an event loop: the work runs in threads, and the loop is never blocked."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from ragcache.engine.answer import Answer, Event
from ragcache.engine.options import DEFAULT_K, AskOptions, ChatOptions, ReadOptions, RetrieveOptions
from ragcache.engine.passages import Passage
from ragcache.engine.precompute import PrecomputeReport
from ragcache.errors import CancelledError, StoreClosedError
from ragcache.ingest.report import IngestReport
from ragcache.retrieval.retriever import Hit
from ragcache.runtime import Home

T = TypeVar("T")
THREADS = 16
_END = object()


class Threads:
    """A pool of its own: streams last for seconds, and would starve whatever else uses the loop's default one."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ragcache-async")
        self._closed = False
        self._home = Home("this store was opened", "open it")

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """The function's result, run with the caller's context variables. Raises StoreClosedError, ForkedError."""
        self._check_open()
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: context.run(function, *args, **options)
        )

    async def call_cancellable(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """`call` for a function that takes `cancelled`: an Event, set when the caller's task is cancelled."""
        cancelled = options.pop("cancelled", None) or threading.Event()
        try:
            return await self.call(function, *args, cancelled=cancelled, **options)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def iterate(self, function: Callable[..., Iterator[T]], *args: Any, **options: Any) -> AsyncIterator[T]:
        """Items of the iterator that the function returns; `cancelled` as for `call_cancellable`, set when the caller
        stops early."""
        cancelled = options.pop("cancelled", None) or threading.Event()
        self._check_open()
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[tuple[object, BaseException | None]] = asyncio.Queue()

        def send(item: object, error: BaseException | None = None) -> None:
            try:
                loop.call_soon_threadsafe(items.put_nowait, (item, error))
            except RuntimeError:  # the loop is closed: nobody listens any more
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


class AsyncTwins:
    """The engine's calls for an event loop. Arguments and errors are those of the call without the "a"."""

    def __init__(self) -> None:
        self._threads = Threads()

    async def aingest(self, *args: Any, **options: Any) -> IngestReport:
        """Cancelling the task stops the work; what was stored stays."""
        return await self._threads.call_cancellable(self._own("ingest"), *args, **options)

    async def adelete(self, *args: Any, **options: Any) -> list[str]:
        return await self._threads.call(self._own("delete"), *args, **options)

    async def aprecompute(self, *args: Any, **options: Any) -> PrecomputeReport:
        """Cancelling the task stops the work; what was kept stays."""
        return await self._threads.call_cancellable(self._own("precompute"), *args, **options)

    async def aforget(self, *args: Any, **options: Any) -> list[str]:
        return await self._threads.call(self._own("forget"), *args, **options)

    async def aretrieve(
        self, question: str | NDArray[np.float32], k: int = DEFAULT_K, **options: Unpack[RetrieveOptions]
    ) -> list[Hit]:
        return await self._threads.call(self._own("retrieve"), question, k, **options)

    async def aask(self, question: str, k: int = DEFAULT_K, **options: Unpack[AskOptions]) -> Answer:
        """Cancelling the task stops the work."""
        return await self._threads.call_cancellable(self._own("ask"), question, k, **options)

    async def aask_many(
        self, questions: Iterable[str], k: int = DEFAULT_K, **options: Unpack[AskOptions]
    ) -> list[Answer]:
        """Cancelling the task stops the work."""
        return await self._threads.call_cancellable(self._own("ask_many"), questions, k, **options)

    async def achat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Answer:
        """Cancelling the task stops the work."""
        return await self._threads.call_cancellable(self._own("chat"), messages, **options)

    async def acomplete(
        self, parts: str | Sequence[str | Hit | Passage | int], **options: Unpack[ReadOptions]
    ) -> Answer:
        """Cancelling the task stops the work."""
        return await self._threads.call_cancellable(self._own("complete"), parts, **options)

    def astream(self, question: str, k: int = DEFAULT_K, **options: Unpack[AskOptions]) -> AsyncIterator[Event]:
        """Closing the iterator stops the work."""
        return self._threads.iterate(self._own("stream"), question, k, **options)

    def astream_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> AsyncIterator[Event]:
        """Closing the iterator stops the work."""
        return self._threads.iterate(self._own("stream_chat"), messages, **options)

    def astream_completion(
        self, parts: str | Sequence[str | Hit | Passage | int], **options: Unpack[ReadOptions]
    ) -> AsyncIterator[Event]:
        """Closing the iterator stops the work."""
        return self._threads.iterate(self._own("stream_completion"), parts, **options)

    def _own(self, name: str) -> Callable[..., Any]:
        return getattr(self, name)  # type: ignore[no-any-return]
