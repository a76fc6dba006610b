"""The process that reads files for `sandbox.py`: if it hangs, takes too much memory or crashes, only that file fails.

It imports readers and no model. A line of JSON on standard input requests a file's first or next record, and a line of
JSON on standard output answers with a document, an error or the end. Nothing is pickled.

The process ends when its input ends, when its parent kills it or has ended (also while a reader computes), or when it
takes too much memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from ragcache.errors import ReaderError, ReaderLimitError
from ragcache.ingest.document import Document
from ragcache.ingest.read_limits import ReadLimits
from ragcache.ingest.readers import SourceFile, read_file
from ragcache.ingest.readers.plain import ENCODING

# Exit status of a process that took too much memory.
OVER_MEMORY = 77
WATCH_S = 0.2
# Most bytes of a document's metadata, title and source, as JSON: they are stored, and shown with every answer.
MAX_FIELDS = 1 << 20
# Most bytes of a document's places, as JSON, for each character of its text. Pages and rows take far fewer.
MAX_PLACES = 8


def main(settings: dict[str, Any]) -> None:
    """Answer requests until the parent closes the input. settings: the fields of ReadLimits"""
    limits = ReadLimits(**settings)
    ENCODING.set(limits.encoding)
    answers = _private_output()
    # A reader's remarks on a file belong in its error, not among the parent's log lines.
    logging.disable()
    warnings.simplefilter("ignore")
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    _bound_memory(limits.memory_bytes)
    threading.Thread(target=_watch, args=(os.getppid(), limits.memory_bytes), daemon=True).start()
    try:
        _answer(sys.stdin.buffer, answers, limits)
    except MemoryError:
        os._exit(OVER_MEMORY)
    except BrokenPipeError:
        os._exit(0)  # the parent has closed its end


def _answer(requests: BinaryIO, answers: BinaryIO, limits: ReadLimits) -> None:
    records: Iterator[Document | ReaderError] = iter(())
    path = ""
    _write(answers, b'{"ready": true}')
    for line in requests:
        request = json.loads(line)
        if "file" in request:
            file = request["file"]
            path = file["path"]
            if request["folder"] is not None:
                os.chdir(request["folder"])
            records = read_file(SourceFile(**{**file, "path": Path(path)}))
        _write(answers, _next(records, path, limits))


def _next(records: Iterator[Document | ReaderError], path: str, limits: ReadLimits) -> bytes:
    try:
        record = next(records, None)
        if isinstance(record, Document):
            limits.check_text(record.text, record.where)
            return _document(record)
    except ReaderError as error:
        record = error
    except MemoryError:
        raise
    except Exception as error:
        record = ReaderError(path, f"its reader failed ({type(error).__name__}: {error})")
    if record is None:
        return b'{"end": true}'
    kind = "limit" if isinstance(record, ReaderLimitError) else "error"
    return _json({kind: [record.path, record.reason]})


def _document(record: Document) -> bytes:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    beside, places = _json({**values, "text": "", "places": []}), _json(values["places"])
    if len(beside) > MAX_FIELDS:
        raise ReaderLimitError(
            record.where[:200],
            f"its metadata, title and source take {len(beside):,} bytes, and {MAX_FIELDS:,} are allowed; shorten them",
        )
    if len(places) > MAX_FIELDS + MAX_PLACES * len(record.text):
        raise ReaderLimitError(
            record.where[:200],
            f"the places in it (pages, sheets, rows) take {len(places):,} bytes, more than {MAX_PLACES} for each "
            "character; shorten the names of its pages or sheets",
        )
    return _json({"document": values})


def _json(value: Any) -> bytes:
    # Not escaped, since text in other scripts would grow sixfold. The parent refuses halves of surrogate pairs.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _write(answers: BinaryIO, line: bytes) -> None:
    answers.write(line + b"\n")
    answers.flush()


def _private_output() -> BinaryIO:
    """Return the original standard output, and redirect to standard error whatever readers print to it."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _bound_memory(most: int) -> None:
    try:
        import resource
    except ImportError:  # the system has no such module
        return
    with contextlib.suppress(ValueError, OSError):  # a lower limit may be set from outside
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _watch(parent: int, most: int) -> None:
    while os.getppid() == parent and _resident_bytes() <= most:
        time.sleep(WATCH_S)
    os._exit(OVER_MEMORY if os.getppid() == parent else 0)


def _resident_bytes() -> int:
    """Return the current resident set size in bytes, or its peak if the current value is unavailable."""
    with contextlib.suppress(OSError):  # only Linux has the file; the peak there would include the parent's
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
