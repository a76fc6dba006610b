"""A real server on a free loopback port, in a thread."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import httpx2
from fastapi import FastAPI
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from prometheus_client.parser import text_string_to_metric_families
from waiting import stacks
from waiting import until as wait_for

import ragcache as rc
from ragcache.server.app import create_app
from ragcache.server.run import Server, listen, url_of
from ragcache.server.service import Service
from ragcache.server.settings import ServerSettings


def settings_outside(*prefixes: str) -> list[str]:
    """Names of the environment's variables that begin so, but for those that are the tests' own."""
    return [name for name in os.environ if name.startswith(prefixes) and not name.startswith("RAGCACHE_TEST_")]


@dataclass
class Served:
    """url: without a path. http: a client of it."""

    url: str
    app: FastAPI
    server: Server
    http: httpx.Client

    @property
    def service(self) -> Service:
        return self.app.state.service

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def chat(self, question: str, **fields: object) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=self._body(question, fields))

    def stream(self, question: str, **fields: object) -> AbstractContextManager[httpx.Response]:
        return self.http.stream("POST", "/v1/chat/completions", json=self._body(question, {**fields, "stream": True}))

    def _body(self, question: str, fields: dict[str, object]) -> dict[str, object]:
        return {"model": self.service.chat_model, "messages": [{"role": "user", "content": question}], **fields}


class Caller:
    """A client with a key. question: what it asks where a test does not say"""

    def __init__(self, served: Served, secret: str, question: str) -> None:
        self.served, self.secret, self.question = served, secret, question

    def send(self, method: str, path: str, body=None, **more) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.secret}"}
        return self.served.http.request(method, path, json=body, headers=headers, **more)

    def post(self, path: str, **body) -> httpx.Response:
        return self.send("POST", path, body)

    def chat(self, content: str = "", **extension) -> httpx.Response:
        messages = [{"role": "user", "content": content or self.question}]
        return self.post("/v1/chat/completions", model="tiny", messages=messages, max_tokens=1, ragcache=extension)

    def ollama(self) -> httpx.Response:
        messages = [{"role": "user", "content": self.question}]
        return self.post("/api/chat", model="tiny", messages=messages, stream=False, options={"num_predict": 1})

    def mcp(self, tool: str, **arguments) -> str:
        async def call() -> str:
            async with (
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {self.secret}"}) as http,
                Client(streamable_http_client(f"{self.served.url}/mcp", http_client=http)) as client,
            ):
                told = await client.call_tool(tool, arguments)
                return json.dumps(told.structured_content or [part.text for part in told.content])

        return asyncio.run(call())


READS: dict[str, Callable[[Caller], str]] = {
    "search": lambda c: c.post("/v1/search", query=c.question, k=50).text,
    "search by words": lambda c: c.post("/v1/search", query=c.question, k=50, search="text").text,
    "search both ways": lambda c: c.post("/v1/search", query=c.question, k=50, search="hybrid").text,
    "chat": lambda c: c.chat(retrieve=True, k=50).text,
    "chat that keeps its context": lambda c: c.chat(context="keep", k=50).text,
    "responses": lambda c: c.post("/v1/responses", model="tiny", input=c.question, max_output_tokens=1).text.replace(
        c.question, ""
    ),
    "ollama": lambda c: c.ollama().text,
    "mcp search": lambda c: c.mcp("search", query=c.question, k=50),
    "mcp ask": lambda c: c.mcp("ask", question=c.question, k=50, max_tokens=1),
    "documents": lambda c: c.send("GET", "/v1/documents?limit=1000").text,
}
"""Routes that show passages: what each says to a caller."""


@contextmanager
def serving(kb: rc.RagCache, settings: ServerSettings | None = None, *, web: bool = False) -> Iterator[Served]:
    settings = settings or ServerSettings(drain_s=5)
    app = create_app(kb, settings, web=web)
    with (
        running(app, settings.drain_s) as (url, server),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
    ):
        yield Served(url, app, server, http)


@contextmanager
def running(app: Any, drain_s: float, port: int = 0) -> Iterator[tuple[str, Server]]:
    """Serve the application in a thread, at a free loopback port or at `port`."""
    server = Server(app, drain_s=drain_s)
    with listen("127.0.0.1", port) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield url_of(bound), server
        finally:
            server.drain()
            thread.join(60)
            assert not thread.is_alive(), stacks()


def half_open(served: Served, data: bytes = b"GET /healthz HT") -> socket.socket:
    """A connection on which a request has begun."""
    host, port = served.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=20)
    client.sendall(data)
    return client


def send(
    served: Served, path: str, body: object, kind: str = "application/json", length: int | None = None
) -> socket.socket:
    """A request on a socket of its own, whose answer nobody has read, and which can be shut as by a client that dies.

    body: bytes as they are, all else as JSON. length: what its head says where that is another one
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    host, port = served.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {kind}\r\n"
    client.sendall(f"{head}Content-Length: {length or len(data)}\r\n\r\n".encode() + data)
    return client


def figures(served: Served) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names) -> value, parsed by Prometheus's own parser."""
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(name, data) of server-sent events, parsed by the letter of the standard."""
    name, data = "", []
    for line in lines:
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "", []
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
