"""The way from `ask` to a server: the server writes its address into its store, and `ask` sends questions there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from ragcache.engine.options import AnswerOptions
from ragcache.errors import RagCacheError
from ragcache.files import atomic_write, write_all

FILE, LOCK = "server.json", "server.lock"
KEY = "RAGCACHE_API_KEY"
READY_S = 0.3  # the longest wait for a connection, and for the server to say that it is ready
MOST_S = 600.0
"""Seconds to wait for the next piece of an answer if no limit is given: a server's default limit for a whole answer."""
# Hosts on which a server may listen, and the host to connect to. The key is sent to no other machine.
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "127.0.0.1": "127.0.0.1", "::1": "::1", "localhost": "localhost"}
# Options that OpenAI's API has fields for; all others are fields of its extension.
OF_OPENAI = {
    "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "reasoning_effort", "chat_template_kwargs",
}  # fmt: skip


class NotServedError(Exception):
    """No server answers for the store; the message says why."""


class Address(NamedTuple):
    """A server's address.

    url:     where the server listens
    model:   the name by which requests call its model
    weights: the name by which the model was loaded
    """

    url: str
    model: str
    weights: str


@contextmanager
def announced(root: Path, address: Address) -> Iterator[None]:
    """Write the server's address into the store for the length of the `with` block, and hold a lock.

    The system releases the lock when the process ends, however it ends. Nothing is written if another server holds the
    lock or the store cannot be written to.
    """
    lock = FileLock(root / LOCK)
    try:
        lock.acquire(timeout=1)
        with atomic_write(root / FILE) as file:
            write_all(file, json.dumps(address._asdict()).encode())
    except (Timeout, OSError, RagCacheError):
        lock.release()
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            (root / FILE).unlink()
        lock.release()


def find_server(root: Path) -> Address | None:
    """Return the address of the server over this store, or None if no server has written one.

    Raises NotServedError if the server ended without removing its address, listens on another machine, or is not ready
    in time.
    """
    try:
        recorded = json.loads((root / FILE).read_bytes())
        address = Address(*(str(recorded[name]) for name in Address._fields))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotServedError(f"{root / FILE} cannot be read ({error})") from error
    try:
        with FileLock(root / LOCK).acquire(timeout=0):
            (root / FILE).unlink(missing_ok=True)
        raise NotServedError(f"the server at {address.url} is gone")
    except Timeout:
        pass  # the server runs
    except OSError as error:
        raise NotServedError(f"{root / LOCK} cannot be read ({error})") from error
    with _reached(address) as connection:
        connection.request("GET", "/readyz")
        if connection.getresponse().status != 200:
            raise NotServedError(f"the server at {address.url} is not ready")
    return address


def ask_server(
    address: Address, question: str, options: AnswerOptions, more: Mapping[str, Any], say: Callable[[str, str], None]
) -> dict[str, Any]:
    """Return the answer of a server in the form of `Answer.to_json`.

    more: further fields of the API's extension
    say:  called with each piece of the answer as it comes: "content" or "reasoning_content", and the text

    Raises NotServedError if the server cannot be reached or refuses the question, and RagCacheError if it fails in the
    middle of an answer.
    """
    stated = {name: value for name, value in {**vars(options), **more}.items() if value not in (None, ())}
    body = {
        **{name: value for name, value in stated.items() if name in OF_OPENAI},
        "ragcache": {name: value for name, value in stated.items() if name not in OF_OPENAI}
        | {"retrieve": True, "context": "last"},
        "model": address.model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    key = os.environ.get(KEY)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    with _reached(address) as connection:
        connection.connect()
        connection.sock.settimeout(more.get("timeout_s") or MOST_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise NotServedError(f"the server at {address.url} refused ({response.status}: {_reason(response)})")
        try:
            return _answer(response, say)
        except (OSError, HTTPException, ValueError, KeyError) as error:
            raise RagCacheError(f"the server at {address.url} broke off its answer ({error})") from error


@contextmanager
def _reached(address: Address) -> Iterator[HTTPConnection]:
    where = urlsplit(address.url)
    host = LOOPBACK.get(where.hostname or "")
    if host is None:
        raise NotServedError(f"the server at {address.url} listens on no address of this machine's own")
    with closing(HTTPConnection(host, where.port, timeout=READY_S)) as connection:
        try:
            yield connection
        except (OSError, HTTPException) as error:
            raise NotServedError(f"the server at {address.url} does not answer ({error})") from error


def _answer(response: HTTPResponse, say: Callable[[str, str], None]) -> dict[str, Any]:
    pieces: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    about: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    finish = ""
    for event in _events(response):
        if "error" in event:
            raise RagCacheError(str(event["error"]["message"]))
        about |= event.get("ragcache") or {}
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            for kind, parts in pieces.items():
                if text := choice["delta"].get(kind):
                    parts.append(text)
                    say(kind, text)
    counts = {"prompt_tokens": about["prompt_tokens"], "cached_tokens": about["avoided_tokens"]}
    counts |= {"completion_tokens": usage["completion_tokens"], "created_tokens": about["created_tokens"]}
    counts |= {"computed_tokens": about["computed_tokens"]}
    counts |= {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"], "pinned_tokens": 0}
    same = {name: about[name] for name in ("timings", "method", "method_reason", "dropped", "dropped_turns")}
    text, thoughts = ("".join(parts) for parts in pieces.values())
    found = {"text": text, "hits": about["sources"], "usage": counts, **same, "finish_reason": finish}
    return {**found, "logprobs": None, "tool_calls": [], "reasoning": thoughts, "stop": ""}


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON of a stream's events up to its end. Raises ValueError if the end is missing."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
    raise ValueError("it has no end")


def _reason(response: HTTPResponse) -> str:
    try:
        return str(json.loads(response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason
