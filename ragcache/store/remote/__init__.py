"""Remotes: services, shared by several machines, that hold blobs by name."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ragcache.errors import ConfigError
from ragcache.plugins import load

# Time limits of an attempt in seconds, and the number of attempts for a call.
CONNECT_S = 3.0
READ_S = 10.0
WRITE_S = 60.0
RETRIES = 3


class Blob(NamedTuple):
    """A blob's name and size. changed_at: Unix seconds of the last `put`."""

    name: str
    num_bytes: int
    changed_at: float


class Blobs(ABC):
    """A holder of blobs by name, where a name is a path of letters, digits, dots and hyphens.

    Safe to call from several threads.

    A blob is created and replaced atomically. The service's client retries temporary failures and gives up within
    seconds. All methods raise StoreUnreachableError, and StoreError if the service refuses.

    where: the URL without credentials
    """

    where: str

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Store a blob, replacing a blob with the same name.

        Raises StoreFullError, StoreReadOnlyError, StoreNotFoundError (no such bucket).
        """

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Store a blob unless a blob has this name; return whether it was stored."""

    @abstractmethod
    def get(self, name: str) -> bytearray | None:
        """Return the whole blob, or None if it is absent."""

    @abstractmethod
    def look(self, names: Iterable[str]) -> dict[str, Blob]:
        """Return the blobs with these names, without their data; absent names are left out."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete blobs; absent blobs are fine. Raises StoreReadOnlyError."""

    @abstractmethod
    def walk(self, folder: str) -> Iterator[Blob]:
        """Yield the blobs whose names begin with "<folder>/", in any order."""

    @property
    @abstractmethod
    def gives_up(self) -> bool:
        """Return whether the service may evict blobs to free space."""

    def sweep(self, older_than_s: float) -> int:
        """Remove unfinished blobs of killed writers and return how many."""
        return 0

    def close(self) -> None:
        """Close the connections."""
        return


_OBJECTS, _REDIS = "ragcache_remote.object_store:open_objects", "ragcache_remote.redis:open_redis"
SCHEMES: dict[str, Callable[[str], Blobs] | str] = {
    "az": _OBJECTS,
    "file": _OBJECTS,
    "gs": _OBJECTS,
    "redis": _REDIS,
    "rediss": _REDIS,
    "s3": _OBJECTS,
}
"""Functions that open a URL, by its scheme."""


def open_blobs(url: str) -> Blobs:
    """Return the remote at a URL such as s3://bucket/prefix or redis://host:6379/0, without contacting it.

    Raises ConfigError for an unknown scheme, an incomplete URL, or a missing package. No error repeats the URL's
    credentials.
    """
    scheme, sign, _ = url.partition("://")
    if not sign or not re.fullmatch("[a-z0-9+.-]+", scheme):
        raise ConfigError("the remote is no URL; write it like s3://bucket/prefix or redis://host:6379/0")
    return load("the remote's scheme", scheme, SCHEMES)(url)
