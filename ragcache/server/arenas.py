"""Memory that the C library keeps for threads."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

M_ARENA_MAX = -8  # malloc.h of glibc
VARIABLE = "MALLOC_ARENA_MAX"


def limit_arenas(most: int = 2) -> None:
    """Let glibc's malloc use so many arenas, unless MALLOC_ARENA_MAX says how many.

    By default threads get up to eight a core, and each arena keeps what the largest pass in it took: a process with
    many threads grows for an hour. No effect on other C libraries, and none on arenas that are there already.
    """
    if VARIABLE not in os.environ:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, most)
