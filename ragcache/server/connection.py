"""Connections of the server: their number, and the time that a client may take to send a request's header."""

from __future__ import annotations

import logging
import resource
from asyncio import TimerHandle, Transport
from collections import Counter
from contextlib import suppress
from ipaddress import IPv6Network

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ragcache.server.observe import write

MOST_CONNECTIONS = 4096
MOST_FILES = 1 << 16
# Kept for files of the store and the model, and for connections accepted before others are closed.
OTHER_FILES = 512


class Connections(ServerState):
    """A server's connections, and which of them are idle, that is, run no request.

    most: the largest number of connections; beyond it the longest idle connection is closed
    most_each: the largest number of connections of an address; beyond it the longest idle of these is closed, or the
        new connection if all of these run requests
    header_s: seconds that a client may take to send a whole header
    idle: in the order in which they became idle
    by_address: number of connections of each address; see `address_of`
    """

    def __init__(self, most: int, most_each: int, header_s: float) -> None:
        super().__init__()
        self.most = most
        self.most_each = most_each
        self.header_s = header_s
        self.idle: dict[Connection, None] = {}
        self.by_address = Counter[str]()

    def make_room(self, new: Connection) -> None:
        """Close a connection if there are too many of all addresses or of the new connection's address."""
        if self.by_address[new.address] > self.most_each:
            others = (one for one in self.idle if one.address == new.address and one is not new)
            next(others, new).drop(f"more than {self.most_each} connections of an address")
        elif len(self.connections) > self.most and self.idle:
            next(iter(self.idle)).drop(f"more than {self.most} connections")


class Connection(H11Protocol):
    """A connection that is closed when a header takes too long to arrive, or when it is idle and others need its place.

    The time for a header runs from the start of the connection, or from the first byte after a response, and later
    bytes do not extend it. Between a response and that byte uvicorn's keep-alive time applies.
    """

    server_state: Connections

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: TimerHandle | None = None
        self.address = address_of(self.client)
        self.server_state.by_address[self.address] += 1
        self._await_header()
        self.server_state.make_room(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_idle:
            self._await_header()
        else:
            self._end_idleness()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # may begin a pipelined request
        if self.transport.is_closing() or not self._is_idle:
            return
        self.server_state.idle[self] = None
        if self.conn.trailing_data[0]:  # part of the next header came with this request
            self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_idleness()
        counts = self.server_state.by_address
        counts[self.address] -= 1
        if not counts[self.address]:
            del counts[self.address]
        super().connection_lost(exc)

    def drop(self, reason: str) -> None:
        """Close the connection at once, and discard unsent data."""
        self._end_idleness()
        if not self.transport.is_closing():
            write("connection closed", logging.WARNING, reason=reason)
            self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_header(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self.server_state.idle.setdefault(self)
            seconds = self.server_state.header_s
            self._deadline = self.loop.call_later(seconds, self.drop, f"no whole header within {seconds:g} s")

    def _end_idleness(self) -> None:
        self.server_state.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def address_of(client: tuple[str, int] | None) -> str:
    """Return the key under which a client's connections are counted: its IPv4 address, or the first 64 bits of its IPv6
    address, because a host usually owns all addresses with the same first 64 bits."""
    host = client[0] if client else ""
    return str(IPv6Network((host, 64), strict=False)) if ":" in host and "%" not in host else host


def raise_file_limit() -> None:
    """Raise the process's limit of open files to the hard limit, or to MOST_FILES if that is infinite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # macOS refuses more than its kernel's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def affordable_connections() -> int:
    """Return how many connections fit into the limit of open files, with OTHER_FILES kept for other files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(soft // 2, soft - OTHER_FILES))
