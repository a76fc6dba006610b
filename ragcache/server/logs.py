"""Structured logs: one JSON object a line. Nothing that holds text of documents or questions, or a key."""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

log = logging.getLogger("ragcache.server")


def write(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """One line about `event`."""
    log.log(level, event, extra={"fields": fields})


def write_failure(error: BaseException, **fields: Any) -> None:
    """An error that nobody expected: its class and the way it took. Its message may hold text and stays out."""
    write("failure", logging.ERROR, error=type(error).__qualname__, trace=_way(error.__traceback__), **fields)


def _way(trace: TracebackType | None) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)]


class JsonFormatter(logging.Formatter):
    """time, level, logger, event and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line |= {"error": record.exc_info[0].__qualname__, "trace": _way(record.exc_info[2])}
        return json.dumps(line, default=str)
