"""How many arenas the C library gives to threads, as it says itself."""

import ctypes
import os
import re

import forked
import pytest

if not hasattr(ctypes.CDLL(None), "malloc_info"):
    pytest.skip("the C library is not glibc", allow_module_level=True)

# Each count is a fork's own; what is imported is imported once.
THREADS = """
import ctypes, os, threading
from ragcache.server.run import limit_arenas
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
def count(limited, **variables):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    os.environ.update(variables)
    if limited:
        limit_arenas()
    meet, held = threading.Barrier(8), []
    def work():
        held.append(libc.malloc(1000))
        meet.wait()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
    libc.fflush(None)
    os._exit(0)
count(True)
count(False)
count(True, MALLOC_ARENA_MAX="4")
"""


def test_threads_share_two_arenas_unless_the_environment_says_otherwise():
    environ = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    ran = forked.run(THREADS, env=environ)
    assert ran.returncode == 0, ran.stderr
    limited, free, told = (said.count("<heap nr=") for said in re.findall(r"<malloc .*?</malloc>", ran.stdout, re.S))
    assert limited <= 2 < free
    assert told == free, "left to the variable, which the C library reads at the process's start"
