"""API keys: which requests each key allows, and which collections it reads and changes.

A key file is TOML. It holds digests of secrets, and no secret:

    [keys.alice]
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    expires = 2030-01-01
    reads = ["hr", "shared"]
    writes = ["hr"]
    limits = { requests = 60, tokens = 20000 }
    scopes = ["ask", "write"]

"*" means every collection that is not an OpenAI vector store.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import stat
import threading
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from ragcache.errors import ConfigError
from ragcache.files import atomic_write, write_all
from ragcache.store.collections import OTHERS, View, check_name

log = logging.getLogger(__name__)
ASK, WRITE, ADMIN = "ask", "write", "admin"
SCOPES = (ASK, WRITE, ADMIN)
_DIGEST = 64  # hexadecimal digits of SHA-256
LIMITS = ("requests", "tokens", "upload_tokens")
_FIELDS = ("digest", "expires", "limits", "reads", "writes", "scopes")


@dataclass(frozen=True)
class Key:
    """An API key as a server knows it: without its secret.

    digest: SHA-256 of the secret, hexadecimal
    scopes: "ask" (questions, searches, lists), "write" (changes of documents), "admin" (metrics, usage of the store)
    reads, writes: names of collections; "*": every collection that is not a vector store
    limits: the key's own limits by name (LIMITS): requests and tokens a minute, upload_tokens an hour. Limits that the
            key does not have are the server's
    expires: time from which the key is refused; None: never
    """

    id: str
    digest: str = ""
    scopes: frozenset[str] = frozenset(SCOPES)
    reads: frozenset[str] = frozenset([OTHERS])
    writes: frozenset[str] = frozenset([OTHERS])
    limits: Mapping[str, float] = field(default_factory=dict, hash=False)
    expires: datetime | None = None

    @property
    def view(self) -> View:
        """Return the collections that the key sees and changes."""
        reads = self.reads if self.scopes & {ASK, ADMIN} else ()
        return View.of(reads, self.writes if WRITE in self.scopes else ())

    @property
    def is_valid(self) -> bool:
        """Return whether the key has not expired."""
        return self.expires is None or datetime.now(UTC) < self.expires

    def to_toml(self) -> str:
        """Return the key's table. The scopes come last: a key whose end is missing has none, and is refused."""
        expires = [] if self.expires is None else [f"expires = {self.expires.isoformat()}"]
        limits = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.limits.items())
        names = (f"{name} = {json.dumps(sorted(getattr(self, name)))}" for name in ("reads", "writes", "scopes"))
        lines = [f"[keys.{json.dumps(self.id)}]", f'digest = "{self.digest}"', *expires]
        return "\n".join([*lines, *([f"limits = {{ {limits} }}"] if limits else []), *names, ""])


def digest_of(secret: bytes) -> str:
    """Return the digest by which a key file names a secret."""
    return hashlib.sha256(secret).hexdigest()


def new_secret() -> str:
    """Return a new secret of 32 random bytes."""
    return f"rk-{secrets.token_urlsafe(32)}"


def read_key_file(path: Path) -> list[Key]:
    """Return the keys of a file, by id.

    Raises ConfigError, which names the file and the key at fault, if the file cannot be read, is readable by every user
    of the machine, is no TOML or has no table of keys, or if a key has no digest or scopes, or has unknown fields.
    """
    try:
        with open(path, "rb") as file:
            if os.name == "posix" and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o007:
                raise ConfigError(f"{path}: every user of this machine can read the keys; run: chmod o-rwx {path}")
            told = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: the API keys cannot be read ({error}); write them with `ragcache keys`") from error
    found = told.get("keys")
    if not isinstance(found, dict) or len(told) > 1:
        raise ConfigError(f"{path}: there is no table [keys.NAME] in it, or there are others; see `ragcache keys add`")
    return [_key(path, id, fields) for id, fields in sorted(found.items())]


def _key(path: Path, id: str, fields: Any) -> Key:
    where = f"{path}: key {id!r}"
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is no table [keys.{id}] of {', '.join(_FIELDS)}; write it with `ragcache keys add`")
    if unknown := sorted(set(fields) - set(_FIELDS)):
        raise ConfigError(f"{where} has no such field: {', '.join(unknown)}; its fields are {', '.join(_FIELDS)}")
    digest, expires, limits = fields.get("digest"), fields.get("expires"), fields.get("limits", {})
    if not isinstance(digest, str) or len(digest) != _DIGEST or set(digest) - set("0123456789abcdef"):
        raise ConfigError(f"{where} has no digest of {_DIGEST} hexadecimal digits; make it anew: ragcache keys add")
    names = {name: fields.get(name, []) for name in ("scopes", "reads", "writes")}
    for name, values in names.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ConfigError(f'{where}: {name} is a list of texts, such as ["default"]')
    scopes = frozenset(names["scopes"])
    if not scopes or scopes - set(SCOPES):
        raise ConfigError(f"{where} needs scopes, some of {', '.join(SCOPES)}; it has {sorted(scopes)}")
    for name in {*names["reads"], *names["writes"]} - {OTHERS}:
        check_name(name)
    if isinstance(expires, date) and not isinstance(expires, datetime):
        expires = datetime.combine(expires, time(), UTC)
    if expires is not None and not isinstance(expires, datetime):
        raise ConfigError(f"{where}: expires is a date, such as 2030-01-01")
    if not isinstance(limits, dict):
        raise ConfigError(f"{where}: limits are numbers by name, such as limits = {{ requests = 60 }}")
    for name, value in limits.items():
        check_limit(where, name, value)
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return Key(id, digest, scopes, frozenset(names["reads"]), frozenset(names["writes"]), limits, expires)


def check_limit(where: str, name: str, value: Any) -> None:
    """Raise ConfigError if a key cannot have this limit. where: begins the message"""
    if name not in LIMITS:
        raise ConfigError(f"{where} has no such limit: {name!r}; its limits are {', '.join(LIMITS)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise ConfigError(f"{where}: its limit {name} is {value!r}; it is a number, 1 or more")


def write_key_file(path: Path, keys: Iterable[Key]) -> None:
    """Write a key file that only its owner can read, or replace the existing file, whole or not at all."""
    text = "\n".join(["[keys]\n", *(key.to_toml() for key in sorted(keys, key=lambda key: key.id))])
    with atomic_write(path) as file:
        os.chmod(file.name, 0o600)
        write_all(file, text.encode())


class KeyFile:
    """A key file that a server reads again when it changes. Thread-safe.

    If the changed file cannot be read, the keys stay as they were, and an error is logged once for each change.

    Raises ConfigError if the file cannot be read at first, or holds no key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock, self._mark = threading.Lock(), self._stat()
        self._keys = tuple(read_key_file(path))
        if not self._keys:
            raise ConfigError(f"{path}: there is no key in it; make one: ragcache keys add NAME --keys {path}")

    def current(self) -> tuple[Key, ...]:
        """Return the keys, read again if the file has changed."""
        if (mark := self._stat()) != self._mark:
            with self._lock:
                if mark != self._mark:
                    self._mark = mark
                    try:
                        self._keys = tuple(read_key_file(self.path))
                    except ConfigError as error:
                        log.error("the keys stay as they were: %s", error)
        return self._keys

    def _stat(self) -> tuple[int, ...]:
        try:
            found = os.stat(self.path)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def with_key(keys: Iterable[Key], key: Key) -> list[Key]:
    """Return the keys with a new key. Raises ConfigError if its id is taken."""
    known = list(keys)
    if any(one.id == key.id for one in known):
        raise ConfigError(f"there is a key {key.id!r} already; revoke it first, or name this one otherwise", "id")
    return [*known, key]


def without_key(keys: Iterable[Key], id: str) -> list[Key]:
    """Return the keys without a key. Raises ConfigError if no key has the id."""
    known = list(keys)
    rest = [one for one in known if one.id != id]
    if len(rest) == len(known):
        raise ConfigError(f"there is no key {id!r}; `ragcache keys list` shows them", "id")
    return rest


FULL = Key("")
"""The key of a request to a server without keys. Keys of a plain list have its rights."""


def plain_key(secret: str) -> Key:
    """Return a key of a plain list, named by the beginning of its digest."""
    digest = digest_of(secret.encode())
    return replace(FULL, id=digest[:8], digest=digest)
