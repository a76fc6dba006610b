"""A store's access to a remote, which may be slow, down, or in use by another store."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from ragcache.errors import ConfigError, SchemaVersionError, SealError, StoreUnreachableError
from ragcache.seal import UNSEALED, VARIABLE, Seal
from ragcache.store.remote import Blobs, open_blobs

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
        """Write the id of the store's present secret into the marker. Call it once all blocks are sealed with it.

        Raises the errors of `use`, and StoreFullError, StoreReadOnlyError.
        """
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


def connect(url: str, owner: str, seal: Seal, *, read_only: bool = False) -> Connection:
    """Return a store's checked connection to its remote. Raises the errors of `open_blobs` and `Connection.check`."""
    connection = Connection(open_blobs(url), owner, read_only=read_only, seal=seal)
    try:
        connection.check()
    except BaseException:
        connection.close()
        raise
    return connection
