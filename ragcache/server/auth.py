"""Access control: API keys, allowed hosts, and protection from requests of other origins' pages."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache.engine.keys import ADMIN, ASK, WRITE, Key, KeyFile, digest_of, plain_key
from ragcache.errors import ConfigError
from ragcache.models.deadline import CALLER
from ragcache.server.http_errors import ApiError
from ragcache.server.quotas import REQUESTS, Quotas

VARIABLE = "RAGCACHE_API_KEYS"
CHANGED = ("/v1/documents", "/v1/files", "/v1/vector_stores")
"""Paths below which requests other than reads and searches change documents."""
LOOPBACK = "loopback"
"""Stands in `allowed_hosts` for every name of the loopback interface."""


def read_keys(file: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of a file (one a line, comments after #) and of RAGCACHE_API_KEYS (separated by commas or
    spaces).

    Raises ConfigError if the file cannot be read, or if the file or the variable has no key: a server that was meant to
    be locked must not be open.
    """
    keys = environment.get(VARIABLE, "").replace(",", " ").split()
    if VARIABLE in environment and not keys:
        raise ConfigError(f"{VARIABLE} is set and there is no API key in it; write one, or unset the variable")
    if file is not None:
        found = _keys_in(file)
        if not found:
            raise ConfigError(f"{file}: there is no API key in it; write one a line")
        keys += found
    return tuple(dict.fromkeys(keys))


def _keys_in(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the API keys cannot be read ({error})") from error
    return [key for line in lines if (key := line.partition("#")[0].strip())]


class ApiKeys:
    """The keys of a plain list, which may do everything, and those of a key file. A look-up takes the same time for
    every key, valid or not.
    """

    def __init__(self, keys: Iterable[str], file: KeyFile | None = None) -> None:
        self._plain = [plain_key(key) for key in keys]
        self._file = file

    def __bool__(self) -> bool:
        return bool(self._plain) or self._file is not None

    def find(self, secret: bytes) -> Key | None:
        """Return the key with this secret, or None if no key has it or it has expired."""
        given, keys = digest_of(secret), [*self._plain, *(() if self._file is None else self._file.current())]
        found = [key for key in keys if hmac.compare_digest(given, key.digest)]  # all keys, for constant time
        return next((key for key in found if key.is_valid), None)


def scope_of(method: str, path: str) -> str:
    """Return the scope that a request needs.

    For /mcp that is ASK: if the key may not write, the view of the documents refuses changes.
    """
    if path == "/metrics":
        return ADMIN
    changes = method not in ("GET", "HEAD") and path.startswith(CHANGED) and not path.endswith("/search")
    return WRITE if changes else ASK


def is_open(path: str, open_paths: Sequence[str]) -> bool:
    """Return whether a path needs no key: it is an open path, or below an open folder such as "/static/"."""
    return path in open_paths or path.startswith(tuple(one for one in open_paths if one.endswith("/") and one != "/"))


class Guard:
    """Middleware that lets in requests for open paths, and other requests with a key, before their body is read.

    open_paths:    see `is_open`
    quotas:        limits the requests of each key
    allowed_hosts: names allowed in the Host header, against pages that rebind their own name to this address; empty:
                   any; LOOPBACK: every loopback name
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: Sequence[str], allowed_hosts: Sequence[str], quotas: Quotas
    ) -> None:
        self.app = app
        self.quotas = quotas
        self.keys = keys
        self.open_paths = open_paths
        self.allowed_hosts = frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        CALLER.set("")
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self.app(scope, receive, send)
        else:
            await problem.response(scope)(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._goes_by(_name(host)):
            return ApiError(403, "this server does not go by the name in the Host header", "host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in ("GET", "HEAD") and not _same_host(origin, host):
            return ApiError(403, "pages of another origin cannot use this server", "origin_not_allowed")
        if is_open(scope["path"], self.open_paths):
            return None
        problem = self._key_problem(scope, headers) if self.keys else None
        if problem is None:
            try:
                self.quotas.check(REQUESTS)
            except ApiError as error:
                return error
            self.quotas.charge(REQUESTS, 1)
        return problem

    def _goes_by(self, name: str) -> bool:
        named = self.allowed_hosts
        return not named or name in named or (LOOPBACK in named and is_loopback(name))

    def _key_problem(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Note the request's key in the request's state.

        Return an error if the key is missing or wrong, or lacks the scope that the request needs; else None.
        """
        given = headers.getlist("authorization")
        if not given and "anthropic-version" in headers:  # Anthropic's clients have another header for the key
            given = [f"Bearer {key}" for key in headers.getlist("x-api-key")]
        scheme, _, secret = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        key = self.keys.find(secret.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
        if key is not None:
            CALLER.set(key.id)
            self.quotas.enter(key)
            scope.setdefault("state", {})["key"] = key
            needed = scope_of(scope["method"], scope["path"])
            if needed in key.scopes or (needed == ASK and ADMIN in key.scopes):
                return None
            return ApiError(403, f"the key {key.id!r} has no scope {needed!r}; use one that has it", "not_allowed")
        message = "the API key is wrong" if given else "an API key is needed: send it as Authorization: Bearer KEY"
        return ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _name(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def is_loopback(name: str) -> bool:
    """Return whether a host name or address is of the loopback interface."""
    with suppress(ValueError):
        return ip_address(name.strip("[]")).is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _same_host(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False
