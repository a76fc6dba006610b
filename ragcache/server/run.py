"""Run the application with uvicorn, and let running answers finish before it stops."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from contextlib import ExitStack, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ragcache.errors import ConfigError
from ragcache.server import observe as logs
from ragcache.server.connection import Connection, Connections, affordable_connections
from ragcache.server.service import Service

BACKLOG = 2048
# Connections that the event loop accepts at once. Each one opens a file before it can be refused.
ACCEPTED_AT_ONCE = 64
KEEP_ALIVE_S = 30
# Time for tasks that still run after draining.
CLOSE_S = 5


class Server(uvicorn.Server):
    """A uvicorn server that drains before it stops.

    On the first SIGTERM or SIGINT running answers may finish within `drain_s` seconds, /readyz answers 503, and
    additions of documents are cancelled. A second signal stops everything at once.
    """

    def __init__(self, app: FastAPI, *, drain_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        super().__init__(config)
        self.service: Service = app.state.service
        settings = self.service.settings
        most = settings.max_connections or affordable_connections()
        self.server_state = Connections(most, settings.max_address_connections or -(-most // 2), settings.receive_s)
        self.drain_s = drain_s
        self._drain_until: float | None = None
        self._has_said_so = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(BACKLOG)  # asyncio set the backlog to the number that it accepts at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until is None:
            self.drain()
        else:
            super().handle_exit(sig, frame)

    def drain(self) -> None:
        """Refuse new questions, and stop once the running ones are done or the time is up."""
        self.service.stop()
        self._drain_until = time.monotonic() + self.drain_s

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._is_drained()

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        if not self._has_said_so:  # not in the signal handler, which may interrupt another write to the log
            self._has_said_so = True
            logs.write("draining", requests=len(self.server_state.tasks))
        self.service.end_additions()
        if self.server_state.tasks and time.monotonic() < self._drain_until:
            return False
        self.service.cancel_all()
        return True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes a free port. Raises ConfigError naming the address."""
    with ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{host} port {port}: cannot listen there ({error}); choose another --host or --port"
            ) from error
        undo.pop_all()
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


M_ARENA_MAX = -8  # malloc.h of glibc
VARIABLE = "MALLOC_ARENA_MAX"


def limit_arenas(most: int = 2) -> None:
    """Limit the number of arenas of glibc's malloc, unless MALLOC_ARENA_MAX is set.

    By default glibc makes up to eight arenas per core, and each keeps the memory of the largest pass that ran in it, so
    a process with many threads grows for an hour. Has no effect on other C libraries or on arenas that exist already.
    """
    if VARIABLE not in os.environ:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, most)
