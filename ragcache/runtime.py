"""Teams of threads, with which PyTorch runs large operations on a CPU.

GNU OpenMP gives every thread that runs such an operation a team of its own, which lasts as long as that thread. While
all teams together have more threads than the machine has processors, none of them spins any more as it waits for its
next operation (libgomp, `gomp_throttled_spin_count_var`): every operation of every thread then costs a wake-up, 30 us
instead of 8, and a pass of a model has hundreds of them. So a thread that once copied a block slows all passes for as
long as it lives (docs/architecture.md).

Hence: threads that only read, copy and write run their operations alone, and a thread that has computed ends its team
before it waits, and when it is done. Without an OpenMP library nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ragcache.errors import ForeignPackageError, ForkedError

_SOFT = 1  # omp_pause_soft: settings stay, threads go
_T = TypeVar("_T")


@cache
def _library() -> Any:
    """PyTorch's OpenMP library, which it loads for all to see; None where there is none, or none that can pause."""
    if sys.platform == "win32":
        return None
    torch.get_num_threads()  # now it is loaded
    library = ctypes.CDLL(None)
    known = all(hasattr(library, name) for name in ("omp_set_num_threads", "omp_pause_resource_all"))
    return library if known else None


def work_alone() -> None:
    """The calling thread's operations run on it alone from now on: what a thread that helps does first."""
    if (library := _library()) is not None:
        torch.get_num_threads()  # PyTorch sets the number at a thread's first use of it
        library.omp_set_num_threads(1)


@contextmanager
def working_alone() -> Iterator[None]:
    """Within, the calling thread's operations run on it alone."""
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
    """The calling thread has no team any more, until its next large operation: a third of a millisecond."""
    if "torch" in sys.modules and (library := _library()) is not None:
        library.omp_pause_resource_all(_SOFT)


@contextmanager
def team_ends() -> Iterator[None]:
    """End the calling thread's team on leaving, or when a decorated function returns."""
    try:
        yield
    finally:
        end_team()


@contextmanager
def during(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Within, the context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# PyTorch, imported when it is first used: that takes seconds, and looking into a store needs none of it.
# Modules that commands without models import take `torch` from here and types for annotations under TYPE_CHECKING
# alone; what stands in a module that imports transformers is imported by the function that calls it.
# `tests/cli/test_options.py` holds that.


if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """Stands in for the module."""

        def __getattr__(self, name: str) -> Any:
            import torch as module

            return getattr(module, name)

    torch = _Torch()


# Another project's package that is called `ragcache` too.
# The distribution of that name on PyPI is not this one, which is `ragcache-kv`. Both install a package `ragcache`:
# where both are installed, the files of one lie among, or over, those of the other.


NAME = "ragcache"
# This project's own summary from when its distribution had the other's name: an old editable install is none of theirs.
OWN_SUMMARY = "Retrieval-augmented generation that never reads the same passage twice"


@cache
def refuse_foreign() -> None:
    """Look through the installed distributions, once. Raises ForeignPackageError."""
    from importlib.metadata import distributions  # takes longer to import than the rest of the package's front

    for found in distributions(name=NAME):
        about = found.metadata
        if about and about["Name"] and about["Summary"] != OWN_SUMMARY:
            raise ForeignPackageError(
                f"another project's package, {NAME} {about['Version']} ({about['Summary']}), is installed beside this "
                f"one in {found.locate_file('')}, and both use the import name {NAME}; run: "
                "pip uninstall -y ragcache ragcache-kv, then install ragcache-kv again"
            )


# What a fork leaves behind: the child has copies of its parent's objects, but none of the threads that work for them,
# locks as they stood, and no team of OpenMP. Whatever waits for one of these there waits for ever.


class Home:
    """The process that an object was made in.

    what, again: "this store was opened" and "open it"
    """

    def __init__(self, what: str, again: str) -> None:
        self._what = what
        self._again = again
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._process

    def check(self) -> None:
        """Raises ForkedError in another process."""
        if not self.is_here:
            raise ForkedError(
                f"{self._what} in process {self._process} and is used in its fork {os.getpid()}, where the threads "
                f"that work for it do not exist; {self._again} in each worker, after the fork, or start workers by "
                'multiprocessing.get_context("spawn")'
            )
