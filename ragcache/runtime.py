"""Control of threads: the OpenMP teams with which PyTorch runs large operations on a CPU, time limits for Python code
of others, and a thread for background work.

GNU OpenMP gives every thread that runs such an operation its own team, which lasts as long as the thread. While all
teams together have more threads than the machine has processors, no team thread spins while it waits for its next
operation (libgomp, `gomp_throttled_spin_count_var`): every operation of every thread then costs a wake-up, 30 us
instead of 8, and a pass of a model has hundreds of operations. So a thread that once copied a block slows all passes
for as long as it lives (docs/architecture.md).

Therefore threads that only read, copy and write run their operations alone, and a thread that computes ends its team
before it waits and when it has finished. Without an OpenMP library the functions for teams do nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

from ragcache.lazy_torch import torch

_SOFT = 1  # omp_pause_soft: keep the settings, end the threads
_T = TypeVar("_T")


@cache
def _library() -> Any:
    """Return PyTorch's OpenMP library, whose symbols are global once loaded; None if there is no library that can
    pause."""
    torch.get_num_threads()  # loads the library
    library = ctypes.CDLL(None)
    known = all(hasattr(library, name) for name in ("omp_set_num_threads", "omp_pause_resource_all"))
    return library if known else None


def work_alone() -> None:
    """Run the calling thread's operations on that thread alone from now on. A helper thread calls this first."""
    if (library := _library()) is not None:
        torch.get_num_threads()  # PyTorch sets the number when a thread first uses PyTorch
        library.omp_set_num_threads(1)


@contextmanager
def working_alone() -> Iterator[None]:
    """Run the calling thread's operations on that thread alone within the `with` block."""
    library = _library()
    if library is None:
        yield
        return
    before = torch.get_num_threads()
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


def end_team() -> None:
    """End the calling thread's team until its next large operation; this takes a third of a millisecond."""
    if "torch" in sys.modules and (library := _library()) is not None:
        library.omp_pause_resource_all(_SOFT)


@contextmanager
def team_ends() -> Iterator[None]:
    """End the calling thread's team on leaving, or when a decorated function returns."""
    try:
        yield
    finally:
        end_team()


class _OverError(BaseException):
    """Raised in a thread whose time is over. No `except Exception` of other code may catch it."""


_DEADLINES: dict[int, float] = {}  # by thread
_SENT: set[int] = set()  # threads that an interruption was sent to
_DEADLINES_LOCK = threading.Lock()
_LOOK_S = 0.25


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Interrupt the `with` block and raise TimeoutError if it takes longer than `seconds`: for Python code of others.

    The interruption comes at most a quarter of a second late, between two Python instructions. A single call into C is
    not interrupted.
    """
    own = threading.get_ident()
    _watch()
    try:
        _DEADLINES[own] = time.monotonic() + seconds
        try:
            yield
        finally:
            _forget(own)
    except _OverError:
        _forget(own)
        raise TimeoutError(f"over {seconds:g} s") from None


def _forget(thread: int) -> None:
    """Stop watching a thread. An interruption that was already sent to it is raised here.

    The interruption is not withdrawn, because CPython 3.11 would then go on checking for it before each instruction.
    The loop gives it instructions between which it can be raised.
    """
    with _DEADLINES_LOCK:
        _DEADLINES.pop(thread, None)
        sent = thread in _SENT
        _SENT.discard(thread)
    for _ in range(100 if sent else 0):
        pass


@cache
def _watch() -> None:
    """Start the thread that interrupts others, once a process."""
    threading.Thread(target=_interrupt_late, name="ragcache-limit", daemon=True).start()


os.register_at_fork(after_in_child=_watch.cache_clear)


def _interrupt_late() -> None:
    while True:
        time.sleep(_LOOK_S)
        with _DEADLINES_LOCK:
            for thread, deadline in list(_DEADLINES.items()):
                if time.monotonic() > deadline:
                    _SENT.add(thread)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OverError))


@contextmanager
def during(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set the context variable to this value within the `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Background:
    """A thread for work that may be left undone. Close it before the objects that the work uses.

    most: calls that may be waiting or running; beyond them, `submit` does nothing
    """

    def __init__(self, name: str, most: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=work_alone)
        self._room = threading.BoundedSemaphore(most)

    def submit(self, work: Callable[..., object], *arguments: object) -> None:
        """Call `work` later, in the thread, unless too many calls wait or the thread is being closed."""
        if not self._room.acquire(blocking=False):
            return
        try:
            self._pool.submit(work, *arguments).add_done_callback(lambda _: self._room.release())
        except RuntimeError:  # the pool is being closed
            self._room.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all calls submitted so far have ended, or `timeout_s` seconds have passed."""
        with suppress(RuntimeError, TimeoutError):
            self._pool.submit(int).result(timeout_s)

    def close(self, *, cancel: bool = False) -> None:
        """Finish the calls that wait; with `cancel`, only the call in progress. May be called twice."""
        self._pool.shutdown(cancel_futures=cancel)
