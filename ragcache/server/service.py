"""State that all routes share: the knowledge base, the limits and the metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar
from weakref import WeakSet

from fastapi import Depends, Query
from starlette.requests import Request

from ragcache import Answer, RagCache
from ragcache.engine.info import Info
from ragcache.engine.keys import ADMIN, FULL, Key
from ragcache.errors import StoreError, StoreUnreachableError
from ragcache.ingest.read_limits import TokenLimits
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.models.deadline import CALLER, Limit, limited
from ragcache.prompt import encode_text
from ragcache.server import observe as logs
from ragcache.server.http_errors import NO_RETRY, OWN_FAULTS, ApiError, ClientGoneError, as_api_error
from ragcache.server.limits import Slots, Writers
from ragcache.server.metrics import Metrics
from ragcache.server.quotas import TOKENS, UPLOAD_TOKENS, Quotas
from ragcache.server.record import RequestLog
from ragcache.server.settings import ServerSettings
from ragcache.server.uploads import UploadFolder

T = TypeVar("T")
U = TypeVar("U")
THREADS = 8
DOCUMENTS = "/v1/documents"
# Embedding requests that run at once. They share the embedder, take no slots of questions and leave most threads free.
EMBEDDING_SLOTS = 4
# Uploads whose files are read at once, each by a process of its own, and none of them with the writer's lock.
READING_SLOTS = 3


class Service:
    """A served knowledge base, as a request sees it.

    kb:         the view of the knowledge base that the request sees; all collections but vector stores, unless its key
                or the request itself says otherwise
    unfiltered: the whole knowledge base
    key:        the request's key
    chat_model, embedding_model, reranking_model: names that requests use; None if there is no reranker
    plain_model: the chat model's name for requests without passages, such as those for a conversation's title
    created:  when the server started, in Unix seconds
    log:      the log of requests, if the server keeps one
    """

    def __init__(self, kb: RagCache, settings: ServerSettings) -> None:
        self.unfiltered, self.key = kb, FULL
        self.kb = kb.seen_by(FULL.view)
        self.settings = settings
        shared = len(settings.api_keys) > 1 or settings.key_file is not None
        self.slots, self.embedding_slots = (
            Slots(slots, settings.max_queue, max(1, slots - max(1, slots // 4)) if shared else None)
            for slots in (settings.slots, EMBEDDING_SLOTS)
        )
        self.writers = Writers(settings.write_wait_s)
        self.reading_slots = Slots(READING_SLOTS, settings.max_queue, 1 if shared else None)
        self.quotas = Quotas.of(settings)
        self._readers: list[IsolatedReader] = []
        self.uploads = UploadFolder(kb.store.layout.root / "uploads")
        self.figures = Figures(kb, settings.figures_s, self.in_thread)
        tiers = list(kb.info().bytes_by_tier)
        self.metrics = Metrics(self.slots, tiers, kb.pass_stats, kb.admission, kb.prefix_stats)
        self.slots.on_wait = self.metrics.queue_wait.observe
        self.log: RequestLog | None = None
        if settings.record is not None:
            self.log = RequestLog(settings.record, lambda text: len(encode_text(kb.lm.tokenizer, text)))
        self.chat_model = settings.model_name or _public_name(kb.lm.name)
        self.plain_model = f"{self.chat_model}:plain"
        self.embedding_model = kb.embedder.name
        reranker = kb.retriever.reranker
        self.reranking_model = None if reranker is None else _public_name(reranker.name)
        self.created = int(time.time())
        self.warm = False
        self.draining = False
        self._working: set[asyncio.Task[None]] = set()
        self._additions: WeakSet[asyncio.Task[None]] = WeakSet()
        self._threads: list[ThreadPoolExecutor] = []  # one, or none before the first use and after `close`

    async def seen_by(self, key: Key, collection: str | None = None, *, create: bool = False) -> Service:
        """Return the service as a key sees it, or limited to a single collection that the key may read.

        create: create the collection if it does not exist and the key may write to it

        Raises NoSuchCollectionError.
        """
        seen = copy(self)
        seen.key = key
        if collection is not None or key.view != FULL.view:
            seen.kb = await self.in_thread(_seen, self.unfiltered, key, collection, create)
        return seen

    async def start(self) -> None:
        """Delete files left by killed servers, and warm up the model, whose first pass takes longer."""
        self.draining = False
        await self.in_thread(self._clean)
        await self.in_thread(self.kb.warm_up)
        self.warm = True

    def _clean(self) -> None:
        try:
            self.uploads.clean()
        except (StoreError, OSError) as error:  # a store that cannot be written to is served all the same
            logs.write_failure(error)

    def stop(self) -> None:
        """Refuse new work; running work continues."""
        self.draining = True

    def end_additions(self) -> None:
        """Cancel running additions of documents. Documents stored so far stay, and a repeated request continues from
        there.

        Call it on the event loop.
        """
        while self._additions:
            self._additions.pop().cancel()

    def cancel_all(self) -> None:
        """Cancel all running work."""
        for task in list(self._working):
            task.cancel()

    def close(self) -> None:
        """Shut down the threads; a later start makes new ones."""
        while self._threads:
            self._threads.pop().shutdown(wait=True, cancel_futures=True)
        while self._readers:
            self._readers.pop().close()
        self.uploads.close()
        if self.log is not None:
            self.log.close()

    @contextmanager
    def reader(self) -> Iterator[IsolatedReader]:
        """Lend a reader of files, whose process goes on for the next upload."""
        reader = self._readers.pop() if self._readers else IsolatedReader(self.kb.ingestor.config.reading)
        try:
            yield reader
        finally:
            self._readers.append(reader)

    async def in_thread(self, function: Callable[..., T], *args: Any, cancelled: threading.Event | None = None) -> T:
        """Run a blocking function in a thread. If cancelled, wait until it returns: a thread cannot be stopped, and
        must not run on after its slot is released.

        cancelled: set on cancellation; the function checks it
        """
        if not self._threads:  # the loop's own pool is small on small machines, and others use it too
            self._threads.append(ThreadPoolExecutor(THREADS, thread_name_prefix="ragcache-server"))
        future = asyncio.get_running_loop().run_in_executor(self._threads[0], function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if cancelled is not None:
                cancelled.set()
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # mark it as retrieved: the caller was cancelled
            raise

    async def compute(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """Run a function in a thread, in an embedding slot, and return its result.

        If the client hangs up or the time is over, `LIMIT` signals that to the function. Raises ClientGoneError, and
        ApiError if the time is over (504), the queue is full or the server is shutting down (503).
        """
        limited = alone(partial(self.limited, function, *args))
        work = self._begin([limited], self.embedding_slots.hold, self.settings.timeout_s)
        return await work.unless_gone(request, work.last())

    async def limited(self, function: Callable[..., T], *args: Any) -> T:
        """Run `in_thread` with a `LIMIT` that signals cancellation to the function."""
        gone = threading.Event()

        def run() -> T:
            with limited(Limit(gone)):
                return function(*args)

        return await self.in_thread(run, cancelled=gone)

    def answer(self, *answers: AsyncGenerator[T, None], timeout_s: float | None = None) -> Work[T]:
        """Start the answers to a request, each in its own slot. The server's time limit and the request's own apply.

        answers: the events of each answer

        Raises ApiError: 503 if the server is shutting down, 429 if the caller's key has used up its tokens.
        """
        self.quotas.check(TOKENS)
        most = self.settings.timeout_s if timeout_s is None else min(timeout_s, self.settings.timeout_s)
        return self._begin(answers, self.slots.hold, most)

    def count_answer(self, answer: Answer) -> None:
        """Count an answer in the metrics, and its tokens for the caller's key."""
        tokens = answer.usage.computed_tokens + answer.usage.completion_tokens
        self.quotas.charge(TOKENS, tokens)
        if CALLER.get():
            self.metrics.key_tokens.labels(CALLER.get()).inc(tokens)
        self.metrics.count_answer(answer)

    def change(self, items: AsyncGenerator[T, None]) -> Work[T]:
        """Start a change of the documents, without a time limit; changes run one after another.

        Raises ApiError (503) if the server is shutting down.
        """
        return self._begin([items], self.writers.hold, None)

    def add(self, items: AsyncGenerator[T, None], *, holds: bool = True) -> Work[T]:
        """Start an addition, which `end_additions` may cancel and which has a time limit.

        holds: whether to hold the writer's lock; otherwise `items` holds it for the part that needs it

        Raises ApiError (429) if the caller's key has added its tokens of this hour.
        """
        self.quotas.check(UPLOAD_TOKENS)
        work = self._begin([items], self.writers.hold if holds else nullcontext, self.settings.upload_s)
        self._additions.update(work.tasks)
        return work

    def addition_limits(self) -> TokenLimits:
        """Return the limits of an addition by the caller's key."""
        limits, left = self.settings, self.quotas.left(UPLOAD_TOKENS)
        found = self.kb.token_limits(
            limits.document_tokens, limits.upload_tokens, limits.upload_kv_bytes, limits.upload_s
        )
        if found.call is not None and left < found.call:
            found = TokenLimits(found.document, int(left), "left to this key in this hour")
        return found

    def _begin(
        self,
        generators: Sequence[AsyncGenerator[T, None]],
        hold: Callable[[], AbstractAsyncContextManager[None]],
        timeout_s: float | None,
    ) -> Work[T]:
        if self.draining:
            raise stopping()
        work = Work(generators, hold, timeout_s)
        for task in work.tasks:
            self._working.add(task)
            task.add_done_callback(self._working.discard)
        return work

    def told(self, error: Exception, request: Request) -> ApiError:
        """Return an error as a response, without paths of this machine. Errors of the server itself are logged."""
        problem = as_api_error(error, getattr(request.state, "asked", None))
        if problem.status_code in OWN_FAULTS or isinstance(error, StoreUnreachableError):
            logs.write_failure(error, request_id=request.scope.get(logs.ID, ""))
        places = {self.kb.lm.name: self.chat_model, str(self.kb.store.layout.root): "the store"}
        for place, name in places.items():
            problem.detail = problem.detail.replace(place, name) if Path(place).is_absolute() else problem.detail
        return problem

    async def figures_seen(self) -> Info:
        """Return the store's figures; for a key without the scope "admin" only counts of the documents that it sees.

        Bytes and hits would reveal the questions of other keys.
        """
        info = await self.figures.get()
        if ADMIN in self.key.scopes:
            return info
        documents = self.kb.store.documents
        counts = await self.in_thread(documents.counts)
        pending = await self.in_thread(lambda: sum(one.num_pending for one in documents.documents()))
        nothing: dict[str, int] = {}
        return replace(info, **counts._asdict(), pending=pending, bytes_by_tier=nothing, hits_by_tier=nothing, misses=0)

    def retrieves(self, model: str) -> bool:
        """Return whether to retrieve passages for a request to this model, if the request itself does not say.

        Raises ApiError (404) for an unknown model.
        """
        if model != self.plain_model:
            self.check_model(model, self.chat_model)
        return self.settings.retrieve == "on" and model != self.plain_model

    def check_model(self, name: str, served: str) -> None:
        """Raise ApiError (404) if the model requested is not the model served."""
        if name != served:
            raise ApiError(
                404, f"the model {name!r} is not served here; this route takes {served!r}", "model_not_found", "model"
            )


class Figures:
    """The store's counts and sizes. Counting walks directories, so the result is cached for some seconds."""

    def __init__(self, kb: RagCache, max_age_s: float, in_thread: Callable[..., Coroutine[Any, Any, Info]]) -> None:
        self._kb = kb
        self._max_age_s = max_age_s
        self._in_thread = in_thread
        self._lock = asyncio.Lock()
        self._info: Info | None = None
        self._counted_at = 0.0

    async def get(self) -> Info:
        async with self._lock:
            if self._info is None or time.monotonic() - self._counted_at > self._max_age_s:
                self._info = await self._in_thread(self._kb.info)
                self._counted_at = time.monotonic()
            return self._info

    def forget(self) -> None:
        """Drop the cached figures, because the documents have changed."""
        self._counted_at = float("-inf")


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def seen_service(request: Request) -> Service:
    """Return the application's service as the request sees it: by its key, and by the collection that it names in its
    query, its body, or its body's `ragcache`. Raises NoSuchCollectionError."""
    key, asked = getattr(request.state, "key", FULL), getattr(request.state, "asked", None)
    named = (getattr(body, "collection", None) for body in (asked, getattr(asked, "ragcache", None)))
    name = request.query_params.get("collection") or next(filter(None, named), None)
    create = request.method == "POST" and request.url.path == DOCUMENTS
    return await service_of(request).seen_by(key, name, create=create)


async def _service(
    request: Request,
    collection: Annotated[
        str | None, Query(max_length=64, description="The only collection that is seen; else all that the key reads")
    ] = None,
) -> Service:
    """Return `seen_service(request)`, which reads `collection` itself; the parameter is here for /openapi.json."""
    return await seen_service(request)


ServiceParam = Annotated[Service, Depends(_service)]
"""Type of a route's parameter that receives the application's service, as the request sees it."""


def _seen(kb: RagCache, key: Key, collection: str | None, create: bool) -> RagCache:
    seen = kb.as_key(key)
    return seen if collection is None else seen.collection(collection, create=create)


def _public_name(name: str) -> str:
    """Return the public name of a model: for a directory its last part, so that no path of this machine is shown."""
    path = Path(name)
    return path.name if path.is_absolute() or path.is_dir() else name


class Work(Generic[T]):
    """Async generators that run concurrently, each in its own task that holds a slot or the writer's lock.

    Iterating yields (index of the generator, item) as the items arrive, and raises an error of any generator. A slot is
    released when its generator ends, when the time is up, or on `cancel`. `cancel` does not wait, because a response
    that is cut off while being sent cannot.
    """

    def __init__(
        self,
        generators: Sequence[AsyncGenerator[T, None]],
        hold: Callable[[], AbstractAsyncContextManager[None]],
        timeout_s: float | None,
    ) -> None:
        self._timeout_s = timeout_s
        self._queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
        self.tasks = [asyncio.create_task(self._run(*numbered, hold())) for numbered in enumerate(generators)]
        self._running = len(self.tasks)

    async def _run(self, rank: int, items: AsyncGenerator[T, None], place: AbstractAsyncContextManager[None]) -> None:
        end: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s), place, aclosing(items):
                async for item in items:
                    self._queue.put_nowait((rank, item))
        except TimeoutError:
            end = _too_late(self._timeout_s)
        except asyncio.CancelledError:
            end = stopping()
            raise
        except Exception as error:
            end = error
        finally:
            self._queue.put_nowait(end)

    def __aiter__(self) -> Work[T]:
        return self

    async def __anext__(self) -> tuple[int, T]:
        while self._running:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._running -= 1
        raise StopAsyncIteration

    async def unless_gone(self, request: Request, outcome: Awaitable[U]) -> U:
        """Wait for a result of this work. If none comes, the work is cancelled.

        The request's body must have been read. Raises ClientGoneError as soon as the client hangs up.
        """
        result, watch = asyncio.ensure_future(outcome), asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({result, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ClientGoneError
            return result.result()
        except BaseException:
            self.cancel()
            raise
        finally:
            result.cancel()
            watch.cancel()

    async def last(self) -> T:
        """Wait for all generators to end, and return the last item. Raises the error of a generator."""
        return [item async for _, item in self][-1]

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


async def alone(function: Callable[[], Awaitable[T]]) -> AsyncGenerator[T, None]:
    """Yield only the function's result."""
    yield await function()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def stopping() -> ApiError:
    return ApiError(
        503, "the server is shutting down; ask again in a moment", "shutting_down", headers={"Retry-After": "5"}
    )


def _too_late(timeout_s: float | None) -> ApiError:
    return ApiError(
        504,
        f"no answer within {timeout_s:g} s; ask for a shorter one, or when the server has less to do",
        "request_timeout",
        headers=NO_RETRY,
    )
