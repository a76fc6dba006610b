"""Redis or Valkey as a remote, for small sets of blocks in frequent use, in the memory of a server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ragcache.errors import ConfigError, StoreError, StoreFullError, StoreReadOnlyError, StoreUnreachableError
from ragcache.store.remote import CONNECT_S, READ_S, RETRIES, Blob, Blobs

# Fields of the hash that each blob is stored in.
_DATA, _CHANGED_AT = "data", "at"
_AT_ONCE = 500


def open_redis(url: str) -> RedisBlobs:
    """Return the Redis store at a URL. Raises ConfigError for an invalid URL or without the package redis.

    url: redis://[user:password@]host[:port][/db[/prefix]]; rediss:// for TLS
    """
    try:
        from redis import Redis
        from redis.backoff import ExponentialWithJitterBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        raise ConfigError("this remote needs the package redis: pip install 'ragcache-kv[remote]'") from error
    parts = urlsplit(url)
    database, _, prefix = parts.path.strip("/").partition("/")
    where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{'/'.join(filter(None, (database or '0', prefix)))}"
    wrong = ConfigError(f"{where}: not a Redis URL; write it like redis://host:6379/0")
    if database and not database.isdecimal():
        raise wrong
    try:
        client = Redis.from_url(
            urlunsplit((parts.scheme, parts.netloc, database, parts.query, "")),
            socket_connect_timeout=CONNECT_S,
            socket_timeout=READ_S,
            retry=Retry(ExponentialWithJitterBackoff(cap=2.0, base=0.1), RETRIES),
        )
    except (ValueError, TypeError):
        raise wrong from None
    return RedisBlobs(client, where, prefix)


class RedisBlobs(Blobs):
    """Blobs as hashes, each with its bytes and the time of writing. Commands are atomic, so that a blob is never
    incomplete.

    client: a `redis.Redis`
    """

    def __init__(self, client: Any, where: str, prefix: str = "") -> None:
        self.where = where
        self._client = client
        self._prefix = "/".join(filter(None, ("ragcache", prefix, "")))

    @property
    def gives_up(self) -> bool:
        with self._translated():
            memory = self._client.info("memory")
        return bool(memory.get("maxmemory")) and memory.get("maxmemory_policy") != "noeviction"

    def put(self, name: str, data: bytes) -> None:
        with self._translated(StoreReadOnlyError):
            self._client.hset(self._prefix + name, mapping={_DATA: data, _CHANGED_AT: time.time()})

    def create(self, name: str, data: bytes) -> bool:
        with self._translated(StoreReadOnlyError):
            return bool(self._client.hsetnx(self._prefix + name, _DATA, data))

    def get(self, name: str) -> bytearray | None:
        with self._translated():
            data = self._client.hget(self._prefix + name, _DATA)
        return None if data is None else bytearray(data)

    def look(self, names: Iterable[str]) -> dict[str, Blob]:
        return {blob.name: blob for blob in self._look(list(names))}

    def delete(self, names: Iterable[str]) -> None:
        with self._translated(StoreReadOnlyError):
            self._client.delete(*(self._prefix + name for name in names))

    def walk(self, folder: str) -> Iterator[Blob]:
        pattern = "".join(f"[{letter}]" if letter in "*?[]^\\" else letter for letter in f"{self._prefix}{folder}/")
        with self._translated():
            found = {key.decode() for key in self._client.scan_iter(match=pattern + "*", count=_AT_ONCE)}
        names = sorted(key.removeprefix(self._prefix) for key in found)
        for start in range(0, len(names), _AT_ONCE):
            yield from self._look(names[start : start + _AT_ONCE])

    def close(self) -> None:
        self._client.close()

    def _look(self, names: list[str]) -> Iterator[Blob]:
        with self._translated(), self._client.pipeline(transaction=False) as commands:
            for name in names:
                commands.hstrlen(self._prefix + name, _DATA)
                commands.hget(self._prefix + name, _CHANGED_AT)
            answers = commands.execute()
        for name, num_bytes, changed_at in zip(names, answers[::2], answers[1::2], strict=True):
            if num_bytes:
                yield Blob(name, num_bytes, float(changed_at or 0.0))

    @contextmanager
    def _translated(self, refused: type[StoreError] = StoreError) -> Iterator[None]:
        """Translate the client's errors into store errors, without their texts, which may name a user.

        refused: class of the error to raise if the server denies the command
        """
        from redis import exceptions

        try:
            yield
        except exceptions.OutOfMemoryError:
            raise StoreFullError(f"{self.where}: the server's memory is full; raise its maxmemory") from None
        except (exceptions.ReadOnlyError, exceptions.NoPermissionError):
            raise refused(f"{self.where}: not allowed; name the primary, or another user") from None
        except exceptions.AuthenticationError:
            raise refused(f"{self.where}: the server refuses the login; check user and password") from None
        except exceptions.TimeoutError:
            raise StoreUnreachableError(f"{self.where}: no answer in time; check the network") from None
        except (exceptions.ConnectionError, OSError):
            raise StoreUnreachableError(f"{self.where}: cannot be reached; check host, port and network") from None
        except exceptions.RedisError as error:
            name = type(error).__name__
            raise refused(f"{self.where}: the server refuses ({name}); check database and user") from None
