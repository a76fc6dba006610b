"""Remotes: services, shared by several machines, that hold blobs by name."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from ragcache.errors import ConfigError, SchemaVersionError, SealError, StoreUnreachableError
from ragcache.plugins import load
from ragcache.seal import UNSEALED, VARIABLE, Seal

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
    """A holder of blobs by name, a path of letters, digits, dots and hyphens. Safe to call from several threads.

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


# A store's access to a remote, which may be slow, down, or in use by another store.


log = logging.getLogger(__name__)
RETRY_AFTER_S, WRITE_AFTER_S = 10.0, 1.0
MARKER = "ragcache.json"
FORMAT_VERSION = 1


@dataclass(eq=False, repr=False)
class Connection:
    """Access to a remote. After a failure, calls are refused for a while, so that each call does not wait for a dead
    service. Reads, which can do without the remote, are refused for RETRY_AFTER_S; writes, which cannot, for
    WRITE_AFTER_S.

    owner:     id of the store's database. A remote belongs to one database, because blocks that no document there
               refers to are deleted; the first store to open the remote writes the id to a marker
    read_only: the marker is read, but not created
    seal:      of the store; all stores that share the remote share its secret, whose id is in the marker
    """

    blobs: Blobs
    owner: str
    _: KW_ONLY
    read_only: bool = False
    seal: Seal = UNSEALED
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.where = self.blobs.where
        self._lock = threading.Lock()
        self._is_ours = False
        self._failed_at = float("-inf")

    @contextmanager
    def use(self, *, to_write: bool = False) -> Iterator[Blobs]:
        """Lend the remote for one call.

        Raises StoreUnreachableError at once for some seconds after a call has failed; ConfigError if the remote belongs
        to another store; SealError if its blocks have another seal; SchemaVersionError.
        """
        wait_s = self._failed_at + (WRITE_AFTER_S if to_write else RETRY_AFTER_S) - self.clock()
        if wait_s > 0:
            raise StoreUnreachableError(
                f"{self.where}: did not answer a moment ago; it is asked again in {wait_s:.0f} s", wait_s
            )
        try:
            self._check_owner()
            yield self.blobs
        except StoreUnreachableError:
            self._failed_at = self.clock()
            raise
        self._failed_at = float("-inf")

    def check(self) -> None:
        """Try the remote once, so that problems are reported at the start. A remote that does not answer only causes a
        warning.

        Raises the errors of `use`, and StoreNotFoundError, StoreReadOnlyError, StoreError if the service refuses.
        """
        try:
            with self.use():
                pass
        except StoreUnreachableError as error:
            log.warning("%s; until it answers, blocks that are not on this machine are computed", error)

    def close(self) -> None:
        self.blobs.close()

    def _check_owner(self) -> None:
        if self._is_ours:
            return
        with self._lock:
            if self._is_ours:
                return
            found = self.blobs.get(MARKER)
            if found is None and self.read_only:
                return
            if found is None and not self.blobs.create(MARKER, self._mark()):
                found = self.blobs.get(MARKER)
            if found is not None:
                self._refuse_other(found)
            self._is_ours = True

    def reseal(self) -> None:
        """Note the secret that seals now, once all blocks have its seal."""
        with self.use(to_write=True) as blobs:
            blobs.put(MARKER, self._mark())

    def _mark(self) -> bytes:
        marker = {"format": FORMAT_VERSION, "owner": self.owner, "seal": self.seal.id, "made_by": "ragcache"}
        return json.dumps(marker).encode()

    def _refuse_other(self, found: bytearray) -> None:
        try:
            marker = json.loads(found)
            version, owner = int(marker["format"]), str(marker["owner"])
        except (ValueError, KeyError, TypeError) as error:
            raise SchemaVersionError(f"{self.where}: its {MARKER} is not ragcache's; name another prefix") from error
        if version > FORMAT_VERSION:
            raise SchemaVersionError(
                f"{self.where}: remote format {version}; this version of ragcache reads up to {FORMAT_VERSION}: use "
                "the version that made it, or a later one"
            )
        if owner != self.owner:
            raise ConfigError(
                f"{self.where}: holds the blocks of another store, and each would delete what only the other one's "
                "documents refer to; name another prefix, or share that store's database too (PostgreSQL, --database)"
            )
        if marker.get("seal") not in self.seal.known:
            raise SealError(
                f"{self.where}: its blocks are sealed with the key {marker.get('seal')}, which this store does not have"
                f"; give all stores that share it the same key: set {VARIABLE} where each is made and opened, or copy "
                "ragcache.key of the first into the others' folders before they are made"
            )


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


def connect(url: str, owner: str, seal: Seal, *, read_only: bool = False) -> Connection:
    """Return a store's checked connection to its remote. Raises the errors of `open_blobs` and `Connection.check`."""
    connection = Connection(open_blobs(url), owner, read_only=read_only, seal=seal)
    try:
        connection.check()
    except BaseException:
        connection.close()
        raise
    return connection


def open_blobs(url: str) -> Blobs:
    """Return the remote at a URL such as s3://bucket/prefix or redis://host:6379/0, without contacting it.

    Raises ConfigError for an unknown scheme, an incomplete URL, or a missing package. No error repeats the URL's
    credentials.
    """
    scheme, sign, _ = url.partition("://")
    if not sign or not re.fullmatch("[a-z0-9+.-]+", scheme):
        raise ConfigError("the remote is no URL; write it like s3://bucket/prefix or redis://host:6379/0")
    return load("the remote's scheme", scheme, SCHEMES)(url)
