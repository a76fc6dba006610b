"""Serve an application until it is told to stop, and let running answers finish first."""

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
# How many connections the loop takes at once: each is a file before it can be refused.
ACCEPTED_AT_ONCE = 64
KEEP_ALIVE_S = 30
# For what is left when the time for draining is up.
CLOSE_S = 5


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT lets running answers finish, for so many seconds at most, while /readyz says 503, and
    ends the adding of documents; the second ends everything at once."""

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
        self.server_state = Connections(settings.max_connections or affordable_connections(), settings.receive_s)
        self.drain_s = drain_s
        self._drain_until: float | None = None
        self._has_said_so = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(BACKLOG)  # asyncio made the queue as short as what it accepts at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until is None:
            self.drain()
        else:
            super().handle_exit(sig, frame)

    def drain(self) -> None:
        """Take no more questions; stop when the running ones are done, or the time is up."""
        self.service.stop()
        self._drain_until = time.monotonic() + self.drain_s

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._is_drained()

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        if not self._has_said_so:  # not by the signal's handler, which may interrupt a line that is being written
            self._has_said_so = True
            logs.write("draining", requests=len(self.server_state.tasks))
        self.service.end_additions()
        if self.server_state.tasks and time.monotonic() < self._drain_until:
            return False
        self.service.cancel_all()
        return True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one. Raises ConfigError naming the address."""
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
    """Let glibc's malloc use so many arenas, unless MALLOC_ARENA_MAX says how many.

    By default threads get up to eight a core, and each arena keeps what the largest pass in it took: a process with
    many threads grows for an hour. No effect on other C libraries, and none on arenas that are there already.
    """
    if VARIABLE not in os.environ:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, most)
