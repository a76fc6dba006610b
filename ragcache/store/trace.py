"""Accesses to a store, as JSON lines: handles, sizes and tiers, no text.

    {"at": 1763714400.25, "request": "9f3a11c2.7", "handle": "0c5f...", "bytes": 131072, "tokens": 256, "tier": "disk"}

at:      Unix seconds
request: the same for blocks that were requested together, such as the blocks of a question
handle:  names the block. It is a hash; equal passages under one model and salt have equal handles
bytes:   size of the block in host memory
tier:    the tier that had the block; "computed" if no tier had it and it was made
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from ragcache.errors import TraceError

log = logging.getLogger(__name__)
COMPUTED = "computed"
MOST_AWAITED = 1 << 16  # requested blocks that are not made yet; some never are


class Access(NamedTuple):
    """A block that was requested, and the result."""

    request: str
    handle: str
    num_bytes: int
    num_tokens: int
    tier: str
    at: float


class TraceWriter:
    """A trace file, opened for appending, which several processes may share: every line is one write.

    When writing fails, the trace ends with a warning, and questions are still answered. Safe to call from several
    threads.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises TraceError if it cannot be opened for appending."""
        self.path = path
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TraceError(path, f"cannot be written ({error.strerror}); name another file") from error
        self._run = os.urandom(4).hex()
        self._requests = count()
        self._awaited: dict[str, tuple[str, float]] = {}  # handle -> request and time at which no tier had it
        self._lock = threading.Lock()

    def asked(self, handles: Sequence[str], found: Sequence[tuple[int, int, str] | None]) -> str:
        """Record that blocks were requested together, with bytes, tokens and tier of each, or None if no tier served
        it. The line for None is written once the block is made and its size is known. Return the request's name."""
        at = time.time()
        with self._lock:
            request = f"{self._run}.{next(self._requests)}"
            for handle, lookup in zip(handles, found, strict=True):
                if lookup is None:
                    self._awaited[handle] = (request, at)
                else:
                    self._write(Access(request, handle, *lookup, at))
            while len(self._awaited) > MOST_AWAITED:
                del self._awaited[next(iter(self._awaited))]
        return request

    def served(self, request: str, handle: str, lookup: tuple[int, int, str]) -> None:
        """Record the bytes, tokens and tier of a block that was announced to `asked` as None."""
        at = time.time()
        with self._lock:
            if self._awaited.get(handle, ("", at))[0] == request:
                _, at = self._awaited.pop(handle)
            self._write(Access(request, handle, *lookup, at))

    def made(self, handle: str, num_bytes: int, num_tokens: int) -> None:
        """Record that a block was made. It is an access only if it was requested before: ingestion is not an access."""
        with self._lock:
            awaited = self._awaited.pop(handle, None)
            if awaited is not None:
                self._write(Access(awaited[0], handle, num_bytes, num_tokens, COMPUTED, awaited[1]))

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _write(self, access: Access) -> None:
        if self._file is None:
            return
        request, handle, num_bytes, num_tokens, tier, at = access
        sizes = {"bytes": num_bytes, "tokens": num_tokens}
        line = json.dumps({"at": round(at, 6), "request": request, "handle": handle, **sizes, "tier": tier}) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            log.warning("%s: the trace ends here, since it cannot be written (%s)", self.path, error.strerror)
            os.close(self._file)
            self._file = None
