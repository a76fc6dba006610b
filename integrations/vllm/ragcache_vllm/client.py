"""An HTTP client of vLLM's completion servers: token ids in, token ids out.

Several servers over a store form an engine: a request goes to the server that its key belongs to, by rendezvous hashing
(Thaler & Ravishankar, 1998), and to the next by rank if that server does not answer, or fails before the first token.

A thread runs an event loop for all requests. When a caller abandons a request, its task is cancelled, its connection
closes, and vLLM stops computing it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from ragcache.errors import ConfigError, EngineError, ModelMismatchError, RagCacheError
from ragcache.kv.block_key import digest
from ragcache.models.deadline import Limit
from ragcache.models.sampler import TokenScores

log = logging.getLogger(__name__)
CONNECT_S = 5.0
SILENCE_S = 300.0  # longest silence of a server: it may work on other requests first
ASKED_LAST_S = 10.0  # a server that was not reached comes last for so long: each attempt may take CONNECT_S
ERROR_BYTES = 1 << 16
UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout)
TIMEOUT = httpx.Timeout(SILENCE_S, connect=CONNECT_S, pool=CONNECT_S)


class EngineServer(NamedTuple):
    """A vLLM server: its address as given, and its HTTP address."""

    url: str
    base: str


class VllmClient:
    """A client of vLLM servers with the same model. Thread-safe; it connects at the first request.

    url:  "vllm://host:port", or several, separated by commas
    name: the model to request
    key:  sent as bearer token, never shown; None: no key

    Raises ConfigError for another kind of address.
    """

    def __init__(self, url: str, name: str, key: str | None = None) -> None:
        self.url = url
        self.name = name
        self._servers = [EngineServer(one, _http_address(one)) for one in url.split(",")]
        self._key = key
        self._unreached: dict[EngineServer, float] = {}  # when, by time.monotonic
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    def longest_prompt(self) -> int | None:
        """Return how many tokens of prompt and answer every server takes; None if no server says so.

        Raises EngineError if no server answers, ModelMismatchError if a server does not have the model.
        """
        lengths, silent = list[int | None](), list[EngineError]()
        for server in self._servers:
            try:
                lengths.append(self._longest_prompt(server))
            except EngineError as error:
                silent.append(error)
        if not lengths:
            raise silent[0]
        for one in silent:
            log.warning("%s", one)
        return min((length for length in lengths if length is not None), default=None)

    def _longest_prompt(self, server: EngineServer) -> int | None:
        try:
            answer = self.submit(self._get(server, "/v1/models")).result()
        except Exception as error:  # any error: the caller waits for it
            raise _translated(server, error) from None
        try:
            served = {str(model["id"]): model.get("max_model_len") for model in json.loads(answer)["data"]}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{server.url} answers, but not as vLLM does; name the address of `ragcache vllm`"
            ) from error
        if self.name not in served:
            raise _other_model(server, ", ".join(served))
        return served[self.name] if isinstance(served[self.name], int) else None

    def complete(self, body: Mapping[str, Any], limit: Limit, key: str = "") -> Completion:
        """Begin a completion, on the server that `key` belongs to if that server answers.

        body: of the request to vLLM, without the model
        """
        return Completion(self, {**body, "model": self.name}, limit, self.ranked(key))

    def ranked(self, key: str) -> list[EngineServer]:
        """Return all servers in the order in which to try them: first the server that owns the key.

        Servers that could not be reached in the last ASKED_LAST_S seconds come last. If a server is added or removed,
        only its own keys get another owner.
        """
        since = time.monotonic() - ASKED_LAST_S
        down = {server for server, at in self._unreached.items() if at > since}
        return sorted(self._servers, key=lambda server: (server in down, digest([server.url, key])))

    def close(self) -> None:
        """Close all connections; a later request opens new ones."""
        with self._lock:
            loop, client, self._loop, self._client = self._loop, self._client, None, None
        if loop is None:
            return
        if client is not None:
            asyncio.run_coroutine_threadsafe(client.aclose(), loop).result(CONNECT_S)
        loop.call_soon_threadsafe(loop.stop)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Start a coroutine on the loop's thread, and return its future. The thread starts with the first request."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=[self._loop], name="ragcache-vllm", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def pump(
        self,
        body: Mapping[str, Any],
        servers: Sequence[EngineServer],
        out: queue.SimpleQueue[Any],
        headers: Mapping[str, str],
    ) -> None:
        """Put each event of a completion's stream into `out`, then None, or the error that ended it.

        A request that a server fails before the first event is repeated on one further server, not on all, because the
        request itself may be what ends them. A server that was too busy to be reached in time is tried again after the
        others.
        """
        failures, left, busy = 0, deque(servers), set[EngineServer]()
        while left:
            server, has_begun = left.popleft(), False
            try:
                async for event in self._events(body, server, headers):
                    has_begun = True
                    out.put(event)
                out.put(None)
                return
            except Exception as error:  # any error: the caller waits for it
                failed = _translated(server, error)
                if isinstance(error, UNREACHED):
                    self._unreached[server] = time.monotonic()
                else:
                    failures += 1
                if isinstance(error, httpx.ConnectTimeout) and server not in busy:
                    busy.add(server)
                    left.append(server)
                if has_begun or not left or failures > 1 or not isinstance(failed, _ServerFailedError):
                    out.put(failed)
                    return
                log.warning("%s: its question goes to %s", failed, left[0].url)

    async def _events(
        self, body: Mapping[str, Any], server: EngineServer, headers: Mapping[str, str]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a completion's stream."""
        async with self._http().stream("POST", f"{server.base}/v1/completions", json=body, headers=headers) as response:
            await self._check(server, response)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line[len("data: ") :])
                    if not isinstance(event, dict) or "error" in event:
                        raise broken(server.url, _said(event))
                    yield event
        raise broken(server.url, "its stream ended early")

    async def _get(self, server: EngineServer, path: str) -> bytes:
        async with self._http().stream("GET", server.base + path, timeout=CONNECT_S) as response:
            await self._check(server, response)
            return await _beginning(response)

    def _http(self) -> httpx.AsyncClient:
        """Return the client, made on its loop. It ignores proxies, because the engine is given by its address."""
        if self._client is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._client = httpx.AsyncClient(
                headers=headers,
                timeout=TIMEOUT,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
                trust_env=False,
            )
        return self._client

    async def _check(self, server: EngineServer, response: httpx.Response) -> None:
        """Raise EngineError or ModelMismatchError for a response that is not a success."""
        status = response.status_code
        if status == 200:
            return
        said = _message(await _beginning(response))
        if status in (401, 403):
            raise EngineError(
                f"{server.url} refused the key; set RAGCACHE_ENGINE_KEY to the one that it was started with"
            )
        if status == 404:
            raise _other_model(server, said)
        kind = _ServerFailedError if status >= 500 else EngineError
        raise kind(f"{server.url} answered {status}: {said}")


def trace_context() -> dict[str, str]:
    """Return headers with the caller's trace context (W3C), so that vLLM's spans become part of the caller's trace."""
    headers: dict[str, str] = {}
    if "opentelemetry" in sys.modules:  # else there is no tracing
        from opentelemetry.propagate import inject

        inject(headers)
    return headers


class Completion:
    """A completion that is being computed.

    cached_tokens: tokens of the prompt that the engine did not compute; None until it reports them
    """

    def __init__(
        self, engine: VllmClient, body: Mapping[str, Any], limit: Limit, servers: Sequence[EngineServer]
    ) -> None:
        self.cached_tokens: int | None = None
        self._limit = limit
        self._url = engine.url  # of all servers
        self._likeliest = int(body.get("logprobs") or 0)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_over = False
        self._task = engine.submit(engine.pump(body, servers, self._events, trace_context()))

    def tokens(self) -> Generator[tuple[int, TokenScores | None], None, None]:
        """Yield token ids as they come, including the id that ends the text, with log-probabilities if requested.

        Raises EngineError, ModelMismatchError, CancelledError, TimedOutError.
        """
        while (event := self._next()) is not None:
            yield from zip(_ids(event), chain(self._scores(event), repeat(None)), strict=False)

    def end(self) -> None:
        """Read the engine's last events, which have the usage. If the engine goes on with the answer, stop it."""
        while not self._is_over:
            event = self._next()
            if event is not None and _ids(event):
                self.close()

    def close(self) -> None:
        """Stop the engine unless it is done."""
        self._is_over = True
        self._task.cancel()

    def _next(self) -> dict[str, Any] | None:
        """Return the next event; None after the last."""
        while not self._is_over:
            self._limit.check()
            try:
                event = self._events.get(timeout=self._limit.poll_s())
            except queue.Empty:
                continue
            if isinstance(event, dict):
                self._note(event)
                return event
            self._is_over = True
            if event is not None:
                raise event
        return None

    def _scores(self, event: Mapping[str, Any]) -> list[TokenScores]:
        said = next((choice.get("logprobs") for choice in event.get("choices") or ()), None)
        try:
            return [] if said is None else _scores(said, self._likeliest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise broken(self._url, "log-probabilities that are none of vLLM's") from error

    def _note(self, event: Mapping[str, Any]) -> None:
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        if isinstance(cached := details.get("cached_tokens"), int):
            self.cached_tokens = cached


class _ServerFailedError(EngineError):
    """A failure of a server, which another server need not have."""


def broken(url: str, why: str) -> EngineError:
    """Return the error for an answer that ended too early. why: in a few words"""
    return _ServerFailedError(f"{url} broke off ({why}); its log says more. Ask again")


def _other_model(server: EngineServer, said: str) -> ModelMismatchError:
    return ModelMismatchError(
        f"{server.url} does not serve this store's model with ragcache's connector ({said}); start it with "
        "`ragcache vllm` over this store"
    )


def _translated(server: EngineServer, error: Exception) -> RagCacheError:
    if isinstance(error, RagCacheError):
        return error
    if isinstance(error, UNREACHED):
        return _ServerFailedError(
            f"nothing answers at {server.url} ({error or 'timed out'}); start it with `ragcache vllm`"
        )
    if isinstance(error, httpx.TimeoutException):
        return EngineError(f"{server.url} was silent for too long; look at its log, or ask when there is less to do")
    return broken(server.url, str(error) or type(error).__name__)


def _http_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "vllm" or not parts.hostname or port is None or parts.path.strip("/") or parts.username:
        raise ConfigError(f"engine {url!r} is no address of an engine; give vllm://host:port, or several with commas")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_ended())
    finally:
        loop.close()


async def _ended() -> None:
    """Cancel tasks that are left on the loop, such as streams abandoned a moment ago."""
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _ids(event: Mapping[str, Any]) -> list[int]:
    return [id for choice in event.get("choices") or () for id in choice.get("token_ids") or ()]


def _scores(said: Mapping[str, Any], count: int) -> list[TokenScores]:
    """Return the scores in a completion's `logprobs`, in which tokens are named "token_id:7".

    count: the number of likeliest tokens that were requested; vLLM adds the chosen token if it is not among them
    """
    found = []
    for logprob, near in zip(said["token_logprobs"], said["top_logprobs"], strict=True):
        ranked = sorted(near.items(), key=lambda one: -one[1])[:count]
        top = tuple((int(name.removeprefix("token_id:")), float(value)) for name, value in ranked)
        found.append(TokenScores(float(logprob), top))
    return found


async def _beginning(response: httpx.Response) -> bytes:
    found = b""
    async for part in response.aiter_bytes():
        found += part
        if len(found) > ERROR_BYTES:
            break
    return found[:ERROR_BYTES]


def _message(answer: bytes) -> str:
    """Return the first words of an error message."""
    try:
        return _said(json.loads(answer))
    except ValueError:
        return answer[:300].decode("utf-8", "replace")


def _said(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
