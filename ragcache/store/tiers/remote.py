"""A tier in a remote: an object store or a server that several machines share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

from ragcache.codecs import Codec
from ragcache.codecs.block_file import check_finite, pack_block, unpack_block
from ragcache.errors import ConfigError, MissingBlockError, StoreError, StoreReadOnlyError
from ragcache.kv.block import KVBlock
from ragcache.store.remote import Blob, Blobs
from ragcache.store.remote.connection import Connection
from ragcache.store.tiers.block_names import SUFFIX, check_key
from ragcache.store.tiers.tier import DurableTier, Room, TierUsage
from ragcache.store.warn_once import WarnOnce

log = logging.getLogger(__name__)
_T = TypeVar("_T")
BLOCKS, USES = "blocks", "uses"


class RemoteTier(DurableTier):
    """A tier of blobs: blocks/aa/<key>.safetensors, with the same bytes as a file on disk, and uses/aa/<key> with the
    time of the last use.

    A read from a remote that does not answer finds no block and logs a warning, so that blocks are computed again;
    `verify`, `keys`, `delete` and all writing methods raise StoreUnreachableError.
    """

    name = "remote"

    def __init__(self, connection: Connection, codec: Codec) -> None:
        self.where = connection.where
        self._connection = connection
        self._seal = connection.seal
        self.codec = codec
        self._complaints = WarnOnce(log)

    @property
    def budget_bytes(self) -> int | None:
        return None

    @property
    def has_been_bounded(self) -> bool:
        return self._read(lambda blobs: blobs.gives_up, False)

    def put(self, key: str, block: KVBlock, *, encoded: bool = False) -> KVBlock:
        name = _block_name(key)
        data, held = pack_block(key, block, self.codec_for(block, encoded), self._seal)
        with self._writing() as blobs:
            blobs.put(name, data)
        return held

    def get(self, key: str, room: Room | None = None) -> KVBlock | None:
        """Return the block, or None if it is absent or the remote fails. Raises DamagedBlockError,
        SchemaVersionError."""
        name = _block_name(key)
        data = self._read(lambda blobs: blobs.get(name), None)
        return None if data is None else unpack_block(f"{self.where}: {name}", key, data, self.codec.bases, self._seal)

    def verify(self, key: str) -> None:
        name = _block_name(key)
        with self._connection.use() as blobs:
            data = blobs.get(name)
        if data is None:
            raise MissingBlockError(f"{self.where}: no block {key}")
        check_finite(key, unpack_block(f"{self.where}: {name}", key, data, self.codec.bases, self._seal))

    def delete(self, key: str) -> None:
        names = [_block_name(key), _use_name(key)]
        with self._writing() as blobs:
            blobs.delete(names)

    def size(self, key: str) -> int | None:
        return self.sizes([key]).get(key)

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        names = {_block_name(key): key for key in keys}
        return {names[name]: blob.num_bytes for name, blob in self._look(names).items()}

    def keys(self) -> Iterator[str]:
        """Return the keys of the remote's blocks. Raises StoreUnreachableError."""
        return iter([key for key, _ in self._listed(BLOCKS)])

    def usage(self) -> TierUsage:
        none: list[int] = []
        sizes = self._read(lambda _: [blob.num_bytes for _, blob in self._listed(BLOCKS)], none)
        return TierUsage(len(sizes), sum(sizes))

    def used_at(self, key: str) -> float | None:
        """Return the time recorded by `mark_used`, or else the time at which the block was put."""
        block, use = _block_name(key), _use_name(key)
        found = self._look([block, use])
        if block not in found:
            return None
        marked = self._read(lambda blobs: blobs.get(use), None) if use in found else None
        with suppress(ValueError):
            return found[block].changed_at if marked is None else float(marked)
        return found[block].changed_at

    def mark_used(self, key: str, at: float) -> None:
        if key in self:
            with suppress(StoreError, ConfigError), self._writing() as blobs:
                blobs.put(_use_name(key), repr(at).encode())

    def sweep(self, older_than_s: float) -> int:
        """Remove unfinished blobs, and also times of use whose block was deleted; return how many."""
        with self._writing() as blobs:
            swept = blobs.sweep(older_than_s)
        uses = [(key, blob) for key, blob in self._listed(USES) if blob.changed_at <= time.time() - older_than_s]
        lost = {key: blob.name for key, blob in uses} if uses else {}
        for key in self.keys() if lost else ():
            lost.pop(key, None)
        if lost:
            with self._writing() as blobs:
                blobs.delete(lost.values())
        return swept + len(lost)

    def close(self) -> None:
        self._connection.close()

    def _writing(self) -> AbstractContextManager[Blobs]:
        if self._connection.read_only:
            raise StoreReadOnlyError(f"{self.where}: opened read-only; open it for writing to change it")
        return self._connection.use(to_write=True)

    def _look(self, names: Iterable[str]) -> dict[str, Blob]:
        return self._read(lambda blobs: blobs.look(names), {})

    def _read(self, ask: Callable[[Blobs], _T], otherwise: _T) -> _T:
        try:
            with self._connection.use() as blobs:
                found = ask(blobs)
        except (StoreError, ConfigError) as error:
            self._complaints.failed("blocks of the remote are computed instead", error)
            return otherwise
        self._complaints.worked()
        return found

    def _listed(self, folder: str) -> Iterator[tuple[str, Blob]]:
        """Yield the keys and blobs of a folder; names that are not a block's are left out."""
        with self._connection.use() as blobs:
            for blob in blobs.walk(folder):
                key = blob.name.rpartition("/")[2].removesuffix(SUFFIX)
                with suppress(ConfigError):
                    if blob.name in (_block_name(key), _use_name(key)):
                        yield key, blob


def _block_name(key: str) -> str:
    check_key(key)
    return f"{BLOCKS}/{key[:2]}/{key}{SUFFIX}"


def _use_name(key: str) -> str:
    check_key(key)
    return f"{USES}/{key[:2]}/{key}"
