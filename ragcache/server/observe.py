"""Middleware around every request: its id, log line, metrics and security headers."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
import traceback
import uuid
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache.errors import StoreUnreachableError
from ragcache.models.deadline import CALLER
from ragcache.server.http_errors import CLIENT_GONE, HUNG_UP, METHODS, as_api_error, printable
from ragcache.server.metrics import Metrics

REQUEST_ID = "X-Request-ID"
WARNING = "X-Ragcache-Warning"
METHOD = "X-Ragcache-Method"
SECURITY = {
    "Content-Security-Policy": "default-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
# Probed every few seconds, so only their failures are logged.
QUIET = ("/healthz", "/readyz", "/metrics")
# Keys of the ASGI scope and the event name of a request's log line.
FIELDS = "ragcache.log"
REQUEST = "request"
ARRIVED = "ragcache.arrived"
ID = "ragcache.request_id"


def note(request: Request, **fields: Any) -> None:
    """Add fields to the request's log line."""
    request.scope.setdefault(FIELDS, {}).update(fields)


def tell(request: Request, header: str, text: str) -> None:
    """Send a text in a header of the response, WARNING or METHOD, escaped to printable ASCII."""
    request.scope[header] = printable(text.encode("unicode_escape").decode("ascii"))


def waited_s(request: Request) -> float:
    """Return the seconds since the request arrived."""
    return time.perf_counter() - float(request.scope[ARRIVED])


class Observe:
    """The outermost middleware, which adds the id and headers, counts and logs each request.

    An unhandled error is logged and answered with 500. A request whose client hung up is logged with status 499, and
    not as an error.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        header = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = header if re.fullmatch(r"[\w.-]{1,64}", header, re.ASCII) else f"req_{uuid.uuid4().hex}"
        started, status = time.perf_counter(), 0
        scope[ARRIVED], scope[ID] = started, request_id
        method = _method(scope)
        if method == "HEAD":  # routes of GET answer it; uvicorn drops the body, because its own scope still has HEAD
            scope = {**scope, "method": "GET"}

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                headers.update(SECURITY | {name: scope[name] for name in (WARNING, METHOD) if name in scope})
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except HUNG_UP:
            status = CLIENT_GONE
        except Exception as error:
            write_failure(error, request_id=request_id)
            if not status:
                await as_api_error(error).response(scope)(scope, receive, answer)
        finally:
            self._done(scope, method, request_id, status or CLIENT_GONE, time.perf_counter() - started)

    def _done(self, scope: Scope, method: str, request_id: str, status: int, seconds: float) -> None:
        route, key = getattr(scope.get("route"), "path", "other"), CALLER.get()
        self.metrics.requests.labels(route, method, str(status)).inc()
        if key:
            self.metrics.key_requests.labels(key).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        if route in QUIET and status < 400:
            return
        level = logging.ERROR if status in (500, 507) else logging.INFO
        fields = {"request_id": request_id, "method": method, "route": route, "status": status}
        fields |= {"key": key} if key else {}
        write(REQUEST, level, **fields, seconds=round(seconds, 6), **scope.get(FIELDS, {}))


def _method(scope: Scope) -> str:
    """Return the method, or "other" for unknown methods, so that clients cannot add labels to the metrics."""
    return scope["method"] if scope["method"] in METHODS else "other"


# One JSON object a line; it never holds text of documents or questions, or a key.
log = logging.getLogger("ragcache.server")


def write(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write a log line about `event`."""
    log.log(level, event, extra={"fields": fields})


def write_failure(error: BaseException, **fields: Any) -> None:
    """Log an unexpected error by class and stack trace. Its message may hold text and is left out, unless it names the
    part of the store that does not answer.
    """
    if isinstance(error, StoreUnreachableError):
        fields["reason"] = str(error)
    write("failure", logging.ERROR, error=type(error).__qualname__, trace=_way(error.__traceback__), **fields)


def _way(trace: TracebackType | None) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)]


class Throttle(logging.Filter):
    """A log filter that passes the same warning or error once in `every_s`. The next line's `left_out` counts those
    dropped.

    Records are the same if their logger, first line of the message and fields match, the request's id aside. A
    request's own line always passes.
    """

    MOST_KINDS = 1000

    def __init__(self, every_s: float = 1.0) -> None:
        super().__init__()
        self.every_s = every_s
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, ...], tuple[float, int]] = {}  # when the last passed, number dropped since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.msg == REQUEST:
            return True
        fields = getattr(record, "fields", {})
        same = repr({name: value for name, value in fields.items() if name != "request_id"})
        kind, now = (record.name, str(record.msg).partition("\n")[0], same), time.monotonic()
        with self._lock:
            passed, left_out = self._kinds.get(kind, (-math.inf, 0))
            if now - passed < self.every_s:
                self._kinds[kind] = passed, left_out + 1
                return False
            if len(self._kinds) >= self.MOST_KINDS:
                self._kinds.clear()
            self._kinds[kind] = now, 0
        if left_out:
            record.fields = {**fields, "left_out": left_out}
        return True


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, logger, event and the event's own fields."""

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
