"""A log of requests for `ragcache simulate` and `ragcache plan`: hashes and lengths of each prompt's parts, no text."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ragcache import Answer
from ragcache.errors import TraceError
from ragcache.server.chat_types import Message

log = logging.getLogger(__name__)
SYSTEM = ("system", "developer")


class RequestLog:
    """A file to which every answered request is appended as a line, which several servers may share.

    Texts are hashed with a random key that is made when the log is opened and never written: a reader of the log cannot
    test a guess at a text, and equal texts have equal hashes until the server ends. A passage with a KV block is named
    by its handle instead of a hash. `ragcache_plan.logs` describes the lines.
    """

    def __init__(self, path: Path, count_tokens: Callable[[str], int]) -> None:
        """Open the file for appending. Raises TraceError if that is impossible."""
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TraceError(path, f"cannot be written ({error.strerror}); name another file") from error
        self._path = path
        self._count_tokens = count_tokens
        self._key = os.urandom(32)
        self._last = 0.0
        self._lock = threading.Lock()

    def write(self, messages: Sequence[Message], answer: Answer) -> None:
        """Append a line. If that fails, the log ends with a warning, and questions are still answered."""
        spoken = [message for message in messages if message.role not in SYSTEM]
        asked = spoken[-1:] if spoken and spoken[-1].role == "user" else []
        parts = {
            "sys_prompt": self._hashed([message for message in messages if message.role in SYSTEM]),
            "passages_ids": [
                [hit.handle or self._hash(hit.chunk.text), len(hit.chunk.token_ids)] for hit in answer.hits
            ],
            "history": self._hashed(spoken[: len(spoken) - len(asked)]),
            "web_search": [],
            "user_input": self._hashed(asked),
        }
        usage = answer.usage
        lengths = {"input_length": usage.prompt_tokens, "output_length": max(1, usage.completion_tokens)}
        with self._lock:
            # The lines are in the order of the answers' ends; a time never lies before that of the line before.
            self._last = max(self._last, time.time() - answer.timings.total_s)
            line = {"timestamp": round(self._last, 3), **lengths, "hash_ids": parts}
            try:
                if self._file is not None:
                    os.write(self._file, json.dumps(line).encode() + b"\n")
            except OSError as error:
                log.warning("%s: the log ends here, since it cannot be written (%s)", self._path, error.strerror)
                self._end()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _hashed(self, messages: Sequence[Message]) -> list[list[str | int]]:
        """Return hash and tokens of each message that has text."""
        pairs = [(message.text, self._count_tokens(message.text)) for message in messages]
        return [[self._hash(text), tokens] for text, tokens in pairs if tokens]

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=8).hexdigest()
