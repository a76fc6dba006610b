"""The vector index on disk: a single file without pickle, verified before FAISS reads any byte.

    offset  bytes
    0       8     magic "RAGCIDX1"
    8       16    XXH3-128 over everything that follows
    24      8     length of the header, little-endian
    32      n     header: JSON (IndexHeader)
    32+n    ...   faiss.serialize_index

FAISS trusts the lengths that it reads, so a damaged file could crash the process. That is why the checksum comes first.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from ragcache.errors import DamagedIndexError
from ragcache.files import atomic_write, is_leftover, write_all

MAGIC = b"RAGCIDX1"
_BODY = len(MAGIC) + 16


class IndexHeader(NamedTuple):
    """The header of an index file.

    kind: "flat", "hnsw" or "ivfpq"
    generation: generation of the SQL store that the index reflects
    removed: ids that are still in the FAISS structure but must not be found (HNSW)
    """

    kind: str
    dimension: int
    embedder: str
    generation: int
    removed: list[int]


def write_index(path: Path, header: IndexHeader, payload: bytes | memoryview) -> None:
    """Replace the file at `path` atomically: a kill at any instant leaves the old file or the new file.

    Raises StoreFullError, StoreReadOnlyError.
    """
    text = json.dumps(header._asdict(), sort_keys=True).encode()
    length = struct.pack("<Q", len(text))
    digest = xxhash.xxh3_128()
    for part in (length, text, payload):
        digest.update(part)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        if is_leftover(leftover, older_than_s=0):
            leftover.unlink(missing_ok=True)
    with atomic_write(path) as file:
        for part in (MAGIC, digest.digest(), length, text, payload):
            write_all(file, part)


def read_index(path: Path) -> tuple[IndexHeader, memoryview]:
    """Return the file's header and the bytes for FAISS. Raises DamagedIndexError unless every byte is as written."""
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise DamagedIndexError(f"{path}: cannot be read ({error.strerror}); it is rebuilt from the store") from error
    if len(data) < _BODY + 8 or data[: len(MAGIC)] != MAGIC:
        raise DamagedIndexError(f"{path}: not a vector index of this version; it is rebuilt from the store")
    if xxhash.xxh3_128(data[_BODY:]).digest() != data[len(MAGIC) : _BODY]:
        raise DamagedIndexError(f"{path}: bytes do not match their checksum; it is rebuilt from the store")
    (length,) = struct.unpack_from("<Q", data, _BODY)
    start = _BODY + 8
    return IndexHeader(**json.loads(bytes(data[start : start + length]))), data[start + length :]
