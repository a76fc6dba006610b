"""Processes that start in a moment: forks of one that has imported the libraries, which takes seconds each time.

Where a test is about what a process imports, or how it ends, it starts a real one.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Self

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["heavy"])
COMMAND = "from ragcache.__main__ import main; main()"


class Forked:
    """Python that runs a text, as `subprocess.Popen([python, "-c", code, ...], text=True)` does with three pipes."""

    def __init__(self, code: str, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        _ensure_server()
        (child_in, own_in), (own_out, child_out), (own_err, child_err) = (CONTEXT.Pipe(duplex=False) for _ in range(3))
        ends = child_in, child_out, child_err
        given = dict(os.environ if env is None else env)
        self._process = CONTEXT.Process(target=_become, args=(code, list(map(str, arguments)), given, ends))
        self._process.start()
        for end in ends:
            end.close()
        self.stdin = _file(own_in, "w")
        self.stdout = _file(own_out, "r")
        self.stderr = _file(own_err, "r")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._process.is_alive():
            self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 240) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it has not ended"
        return self._process.exitcode


def run(code: str, *arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([python, "-c", code, ...], capture_output=True, text=True)` gives."""
    with Forked(code, *arguments, env=env) as child:
        child.stdin.close()
        said = child.stdout.read(), child.stderr.read()
        return subprocess.CompletedProcess(code, child.wait(), *said)


END = "\nimport atexit; atexit._run_exitfuncs()\n"
"""The end of a text about how a process ends: forks leave out what a real process does last."""


def run_real(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def _file(end: Connection, mode: str) -> IO[str]:
    number = os.dup(end.fileno())
    end.close()
    return open(number, mode, encoding="utf-8", buffering=1)


def _ensure_server() -> None:
    """The server does not inherit sys.path, and its numpy is to start no threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path])))
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        patch.delenv("TRITON_INTERPRET", raising=False)  # some tests set it, and all children get the server's Triton
        forkserver.ensure_running()


def _become(code: str, arguments: list[str], env: dict[str, str], ends: tuple[Connection, ...]) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *arguments]
    warnings.simplefilter("error")
    exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
