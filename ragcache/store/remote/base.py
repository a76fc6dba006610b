"""The contract of a remote: blobs by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Seconds of one attempt, and attempts at one call.
CONNECT_S = 3.0
READ_S = 10.0
WRITE_S = 60.0
RETRIES = 3


class Blob(NamedTuple):
    """changed_at: Unix seconds of the last `put`."""

    name: str
    num_bytes: int
    changed_at: float


class Blobs(ABC):
    """Holds blobs by name, a path of letters, digits, dots and hyphens. Safe to call from several threads.

    A blob appears, and is replaced, whole or not at all. The service's client retries what may succeed a moment later,
    and gives up within seconds. All methods raise StoreUnreachableError, and StoreError where the service refuses.

    where: the URL without credentials
    """

    where: str

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Hold a blob, in place of one of the same name.

        Raises StoreFullError, StoreReadOnlyError, StoreNotFoundError (no such bucket).
        """

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """`put`, unless there is a blob of this name: then nothing happens, and False is returned."""

    @abstractmethod
    def get(self, name: str) -> bytearray | None:
        """The blob whole, or None."""

    @abstractmethod
    def look(self, names: Iterable[str]) -> dict[str, Blob]:
        """What is held under these names; those that are not there are left out."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Forget blobs; absent ones are fine. Raises StoreReadOnlyError."""

    @abstractmethod
    def walk(self, folder: str) -> Iterator[Blob]:
        """Blobs whose names begin with "<folder>/", in any order."""

    @property
    @abstractmethod
    def gives_up(self) -> bool:
        """Whether the service may drop a blob unasked, to make room."""

    def sweep(self, older_than_s: float) -> int:
        """Remove what killed writers left half done; returns how many."""
        return 0

    def close(self) -> None:
        """Let go of connections."""
        return
