"""Files read in a process of their own, under limits of time and memory: a hostile file costs itself alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import IO, Any

from ragcache.errors import ReaderError, ReaderLimitError
from ragcache.ingest.document import Document
from ragcache.ingest.read_limits import ReadLimits
from ragcache.ingest.readers import SourceFile
from ragcache.ingest.sandbox_child import OVER_MEMORY
from ragcache.models.deadline import LIMIT, POLL_S
from ragcache.store.places import Place

# Starting an interpreter does not count as reading; on a busy machine it takes a while.
START_S = 60.0
# Each thread of a library of linear algebra has buffers, which would count as what the reading takes.
_ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# The parent's own sys.path, and not the folder that it happens to stand in (-P): a document named json.py is no module.
_CODE = """
import json, sys
settings = json.loads(sys.stdin.buffer.readline())
sys.path[:] = settings.pop("path")
from ragcache.ingest.sandbox_child import main
main(settings)
"""


class IsolatedReader:
    """Reads one file after the other in a process that is started when it is first needed and, where a file was too
    much for it, anew. Not for two threads at once.

    The process ends with `close`, with this object and with this program, however that ends.
    """

    def __init__(self, limits: ReadLimits | None = None) -> None:
        self.limits = limits or ReadLimits()
        self._process: _Process | None = None

    def read(self, file: SourceFile) -> Iterator[Document | ReaderError]:
        """The documents in a file; what cannot be read, or takes more than the limits allow, is yielded as its error.

        Raises CancelledError and TimedOutError within `limits.limited`, within a moment.
        """
        request: dict[str, Any] = {"file": {**file._asdict(), "path": str(file.path)}, "folder": None}
        if not file.path.is_absolute():
            request["folder"] = os.getcwd()  # the process may have started elsewhere
        name = file.source or os.fspath(file.path)
        while True:
            try:
                answer = self._answer(request, name)
            except ReaderError as error:  # the process is gone: nothing more comes of this file
                yield error
                return
            if "end" in answer:
                return
            if "document" in answer:
                places = [Place(*place) for place in answer["document"].pop("places")]
                yield Document(**answer["document"], places=places)
            else:
                kind = ReaderLimitError if "limit" in answer else ReaderError
                yield kind(*next(iter(answer.values())))
            request = {"next": True}

    def _answer(self, request: Mapping[str, Any], name: str) -> dict[str, Any]:
        try:
            if self._process is None:
                self._process = _Process(self.limits)
                self._process.answer(START_S, name)
            self._process.send(request)
            return self._process.answer(self.limits.seconds, name)
        except BaseException:  # an answer may still come: it would be taken for that to the next question
            self.close()
            raise

    def close(self) -> None:
        """End the process; the next file starts another one."""
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One worker: a line to it, a line from it."""

    def __init__(self, limits: ReadLimits) -> None:
        self._limits = limits
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ALONE},
        )
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_pump, args=(self._popen.stdout, self._lines), daemon=True).start()
        self.end = weakref.finalize(self, _end, self._popen)
        self.send({**asdict(limits), "path": sys.path})

    def send(self, message: Mapping[str, Any]) -> None:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone: the missing answer says so
                self._popen.stdin.write(json.dumps(message).encode() + b"\n")
                self._popen.stdin.flush()

    def answer(self, seconds: float, name: str) -> dict[str, Any]:
        """Raises ReaderError, by this name, where none comes; CancelledError and TimedOutError as LIMIT says."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=POLL_S)
            except Empty:
                LIMIT.get().check()
                if time.monotonic() > deadline:
                    raise self._limits.too_slow(name) from None
                continue
            if not line:
                raise self._ended(name)
            answer: dict[str, Any] = json.loads(line)
            return answer

    def _ended(self, name: str) -> ReaderError:
        status = self._popen.wait()
        if status == -getattr(signal, "SIGALRM", 0):
            return self._limits.too_slow(name)
        if status == OVER_MEMORY:
            return self._limits.too_large(name)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return ReaderError(name, f"the process that read it ended ({how}); the file is damaged or hostile")


def _pump(stream: IO[bytes], lines: SimpleQueue[bytes]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(b"")


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()
    if popen.stdin is not None:
        with contextlib.suppress(OSError):
            popen.stdin.close()
