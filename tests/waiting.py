"""Waiting in tests for what must happen; nothing is measured."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import torch

from ragcache.models.batch import ForwardRequest
from ragcache.models.language_model import LanguageModel

T = TypeVar("T")

WAIT_S = 60.0


def until(condition: Callable[[], object], seconds: float = WAIT_S, every_s: float = 0.001) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(every_s)


def in_own_loop(coroutine: Coroutine[object, object, T]) -> T:
    """What the coroutine returns, run in a loop of another thread: `asyncio.run` drops this thread's, which
    pytest-asyncio keeps, unclosed."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def at_once(*calls: Callable[[], T]) -> list[T]:
    """What these return, each called in a thread of its own; what one of them raised is raised."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [done.result() for done in [threads.submit(call) for call in calls]]


@contextmanager
def beside(*calls: Callable[[], object]) -> Iterator[None]:
    """Within, each of these is called in a thread of its own again and again, once at least; what one of them raised
    is raised behind. Threads take turns fifty times as often as usual, so that they meet in more places."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def repeat(call: Callable[[], object]) -> None:
        call()
        while not over.is_set():
            call()

    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(repeat, call) for call in calls]
        sys.setswitchinterval(interval / 50)
        try:
            yield
        finally:
            sys.setswitchinterval(interval)
            over.set()
        for done in running:
            done.result()


@contextmanager
def model_held(lm: LanguageModel, pool: ThreadPoolExecutor) -> Iterator[None]:
    """Within, a pass of somebody else's is on its way: runs pile up."""
    gate, entered = threading.Event(), threading.Event()

    def hold() -> torch.Tensor:
        entered.set()
        assert gate.wait(WAIT_S)
        return torch.zeros(1)

    run = ForwardRequest(torch.tensor([1]), torch.arange(1), lm.new_cache(1), ordered=True)
    job = pool.submit(lm.scheduler.run, run, hold)
    assert entered.wait(WAIT_S)
    try:
        yield
    finally:
        gate.set()
        job.result(WAIT_S)


def stacks() -> str:
    """Where every thread stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}\n{''.join(traceback.format_stack(frame)[-6:])}" for ident, frame in frames)


class Ticks:
    """Turns of another task while a block ran. A call that blocks the loop leaves at most a single turn."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.count += 1


@asynccontextmanager
async def ticking() -> AsyncIterator[Ticks]:
    """Count the turns of an event loop while a call is awaited."""
    ticks = Ticks()
    task = asyncio.create_task(ticks.run())
    await asyncio.sleep(0)
    try:
        yield ticks
    finally:
        task.cancel()
