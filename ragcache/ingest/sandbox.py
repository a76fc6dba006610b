"""Read files in a separate process with limits on time and memory, so that a hostile file fails without other harm."""

from __future__ import annotations

import contextlib
import json
import os
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

# Time for starting the interpreter, which does not count as reading and takes a while on a busy machine.
START_S = 60.0
# The buffers of linear algebra libraries, a set for each thread, would count as memory that reading takes.
_ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# The child takes over the parent's sys.path. Until then -P keeps the working directory out of its path, so that a
# document named json.py is not imported.
_CODE = """
import json, sys
settings = json.loads(sys.stdin.buffer.readline())
sys.path[:] = settings.pop("path")
from ragcache.ingest.sandbox_child import main
main(settings)
"""


class IsolatedReader:
    """Reads files in a separate process, a file at a time. Not thread-safe.

    The process starts when it is first needed, and starts again after a file has ended it. It ends with `close`, with
    this object and with this program, however the program ends.
    """

    def __init__(self, limits: ReadLimits | None = None) -> None:
        self.limits = limits or ReadLimits()
        self._process: _Process | None = None

    def read(self, file: SourceFile) -> Iterator[Document | ReaderError]:
        """Yield the documents in a file. A record that cannot be read or exceeds the limits is yielded as its error.

        Raises CancelledError and TimedOutError under `deadline.limited`, with little delay.
        """
        request: dict[str, Any] = {"file": {**file._asdict(), "path": str(file.path)}, "folder": None}
        if not file.path.is_absolute():
            request["folder"] = os.getcwd()  # the process may have started elsewhere
        name = file.source or os.fspath(file.path)
        while True:
            try:
                answer = self._answer(request, name)
            except ReaderError as error:  # the process has ended, so the rest of the file is lost
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
        except BaseException:  # a late answer would be taken for the answer to the next request
            self.close()
            raise

    def close(self) -> None:
        """End the process; the next file starts a new process."""
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """The reading process: each request and each answer is a line."""

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
        """Send a request. If the process has ended, the next `answer` raises."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):  # the process has ended
                self._popen.stdin.write(json.dumps(message).encode() + b"\n")
                self._popen.stdin.flush()

    def answer(self, seconds: float, name: str) -> dict[str, Any]:
        """Return the next answer of the process.

        Raises ReaderError, under the file's `name`, if no answer comes within `seconds`, and CancelledError and
        TimedOutError under `deadline.limited`.
        """
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
