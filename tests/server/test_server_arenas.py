"""How many arenas the C library gives to threads, as it says itself."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

if not hasattr(ctypes.CDLL(None), "malloc_info"):
    pytest.skip("the C library is not glibc", allow_module_level=True)

THREADS = """
import ctypes, sys, threading
from ragcache.server.run import limit_arenas
if sys.argv[1] == "limited":
    limit_arenas()
libc, meet, held = ctypes.CDLL(None), threading.Barrier(8), []
libc.malloc.restype = ctypes.c_void_p
def work():
    held.append(libc.malloc(1000))
    meet.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


def arenas(*, limited: bool, **variables: str) -> int:
    environ = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", THREADS, "limited" if limited else ""]
    said = subprocess.run(command, env={**environ, **variables}, capture_output=True, text=True, check=True).stdout
    return said.count("<heap nr=")


def test_threads_share_two_arenas():
    assert arenas(limited=True) <= 2 < arenas(limited=False)


def test_what_the_environment_says_stays():
    assert arenas(limited=True, MALLOC_ARENA_MAX="4") == 4
