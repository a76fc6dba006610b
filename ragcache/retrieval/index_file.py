"""The vector index on disk: one file, no pickle, checked before FAISS sees a byte of it.

    offset  bytes
    0       8     magic "RAGCIDX1"
    8       16    XXH3-128 over everything that follows
    24      8     length of the header, little-endian
    32      n     header: JSON (IndexHeader)
    32+n    ...   faiss.serialize_index

FAISS trusts the lengths that it reads: a damaged file can crash the process. So the checksum comes first.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from ragcache.codecs.atomic import atomic_write, is_leftover, write_all
from ragcache.errors import DamagedIndexError

MAGIC = b"RAGCIDX1"
_DIGEST_BYTES = 16
_BODY = len(MAGIC) + _DIGEST_BYTES


@dataclass(frozen=True)
class IndexHeader:
    """kind: "flat", "hnsw" or "ivfpq". generation: of the SQL store that the index reflects. removed: ids that are
    still in the FAISS structure but must not be found (HNSW)."""

    kind: str
    dimension: int
    embedder: str
    generation: int
    removed: tuple[int, ...]


class IndexFile(NamedTuple):
    header: IndexHeader
    payload: memoryview


def write_index(path: Path, header: IndexHeader, payload: bytes | memoryview) -> None:
    """Replace the file at `path` at once: a kill at any instant leaves the old file or the new one.

    Raises StoreFullError, StoreReadOnlyError.
    """
    text = json.dumps(asdict(header), sort_keys=True).encode()
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


def read_index(path: Path) -> IndexFile:
    """The file's header and the bytes for FAISS. Raises DamagedIndexError unless every byte is as written."""
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
    header = json.loads(bytes(data[start : start + length]))
    return IndexFile(IndexHeader(**{**header, "removed": tuple(header["removed"])}), data[start + length :])
