"""One file a block on local disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from ragcache.codecs import Codec
from ragcache.codecs.atomic import flush_directory, is_leftover
from ragcache.codecs.block_file import encode_block, read_block, write_block
from ragcache.errors import ConfigError, MissingBlockError, translate_os_errors
from ragcache.kv.block import KVBlock
from ragcache.store.tiers.base import Tier, Usage

SUFFIX = ".safetensors"
_KEY = re.compile(r"[0-9a-f]{64}")


class DiskTier(Tier):
    """Files root/aa/bb/<key>.safetensors, where aabb are the key's first digits (some file systems are slow with many
    names in one directory). Blocks are encoded by `codec` when written; any known codec is read.

    Deleting a file leaves it readable to those who have mapped it.
    """

    name: ClassVar[str] = "disk"
    durable: ClassVar[bool] = True

    def __init__(self, root: Path, codec: Codec) -> None:
        self.root = root
        self._codec = codec

    def path(self, key: str) -> Path:
        """Where the block's file is, or would be. Raises ConfigError when the key is no block key, so that no name
        from outside ever becomes a path."""
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{key!r} is no block key: 64 hex digits are")
        return self.root / key[:2] / key[2:4] / f"{key}{SUFFIX}"

    def put(self, key: str, block: KVBlock) -> KVBlock:
        """Written whole and flushed when this returns.

        Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError; then nothing is left behind, and an earlier
        file of the key is still there.
        """
        return write_block(self.path(key), key, block, self._codec)

    def recoded(self, key: str, block: KVBlock) -> KVBlock:
        """The block as `put` would return it, with nothing written. Raises UnencodableBlockError."""
        self.path(key)
        return self._codec.decode(encode_block(key, block, self._codec))

    def get(self, key: str) -> KVBlock | None:
        """Tensors alias the mapped file where the codec lets them. Raises DamagedBlockError, SchemaVersionError."""
        try:
            return read_block(self.path(key), key)
        except MissingBlockError:
            return None

    def verify(self, key: str) -> None:
        """Raises MissingBlockError, DamagedBlockError, SchemaVersionError when the block cannot be served."""
        read_block(self.path(key), key)

    def delete(self, key: str) -> None:
        """Gone from the device too when this returns. Raises StoreReadOnlyError."""
        path = self.path(key)
        with translate_os_errors(path), suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            flush_directory(path.parent)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.path(key).is_file()

    def size(self, key: str) -> int | None:
        try:
            return self.path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def keys(self) -> Iterator[str]:
        return (path.stem for path in self._files() if self._is_block(path))

    def usage(self) -> Usage:
        sizes = [_size(path) for path in self._files() if self._is_block(path)]
        return Usage(len(sizes), sum(sizes))

    def prefetch(self, keys: Sequence[str]) -> None:
        """Have the kernel read all the files at once: the device then sees a deep queue instead of one page fault at a
        time."""
        if not hasattr(os, "posix_fadvise"):
            return
        for key in keys:
            with suppress(OSError):
                descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)

    def sweep(self, older_than_s: float) -> int:
        """Remove temporary files that killed writers left; returns how many. Files of running writers stay."""
        leftovers = [path for path in self._files() if is_leftover(path, older_than_s)]
        for path in leftovers:
            with translate_os_errors(path):
                path.unlink(missing_ok=True)
        return len(leftovers)

    def _files(self) -> Iterator[Path]:
        return (path for shard in _sorted_entries(self.root) for directory in _sorted_entries(shard)
                for path in _sorted_entries(directory))  # fmt: skip

    def _is_block(self, path: Path) -> bool:
        return path.suffix == SUFFIX and bool(_KEY.fullmatch(path.stem)) and path == self.path(path.stem)


def _sorted_entries(directory: Path) -> list[Path]:
    """What is in a directory, by name; nothing when it is none (it may vanish while others write)."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
