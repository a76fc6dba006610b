"""Page cache and file systems, which decide the meaning of "from disk"."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ragcache.engine.loader import BlockLoader
from ragcache.store.counters import Loaded
from ragcache.store.directory import StoreLayout
from ragcache.store.kv_store import KVStore


def drop_page_cache(directory: Path) -> None:
    """Make the kernel drop the contents of all files below. They must be flushed, and not mapped by any process."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def device_read_bytes() -> int | None:
    """Return the bytes that this process has read from storage so far; None if the kernel does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), None)


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, such as ext4. On tmpfs there is no disk to measure."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    resolved = path.resolve()
    holding = [(point, kind) for point, kind in mounts if resolved.is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def read_blocks(loader: BlockLoader, keys: Sequence[str]) -> list[Loaded | None]:
    """Read blocks as a question does: blocks in memory at once, the rest in the loader's threads."""
    kv = loader.kv
    found: dict[str, Loaded | None] = {key: kv.fetch(key) for key in kv.lookup(keys, "memory")}
    slow = kv.lookup([key for key in keys if key not in found])
    found |= {key: read.result() for key, read in loader.begin_reads(slow).items()}
    return [found.get(key) for key in keys]


def fresh_kv_store(root: Path, memory_bytes: int, codec: str = "raw", basis: str | None = None) -> KVStore:
    """Return the blocks below a store's root, with nothing in memory yet."""
    return KVStore(StoreLayout(root).kv, memory_bytes=memory_bytes, codec=codec, basis=basis)
