"""The vector index on disk: a single file without pickle, verified before FAISS reads any byte.

    offset  bytes
    0       8     magic "RAGCIDX2"
    8       84    mark of the store's seal (`ragcache.seal`)
    92      8     length of the header, little-endian
    100     n     header: JSON (IndexHeader)
    100+n   ...   faiss.serialize_index

FAISS trusts the lengths that it reads, so a damaged file could crash the process. That is why the seal is checked
first.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import NamedTuple

from ragcache.errors import DamagedIndexError
from ragcache.files import atomic_write, is_leftover, write_all
from ragcache.seal import MARK_LENGTH, Seal

MAGIC = b"RAGCIDX2"
_BODY = len(MAGIC) + MARK_LENGTH
_NAME = "index"


class IndexHeader(NamedTuple):
    """The header of an index file.

    kind: "flat" or "hnsw"
    dimension: length of the vectors
    embedder: name of the model that made the vectors
    generation: generation of the SQL store that the index reflects
    removed: ids that are still in the FAISS structure but must not be found (HNSW)
    """

    kind: str
    dimension: int
    embedder: str
    generation: int
    removed: list[int]


def write_index(path: Path, header: IndexHeader, payload: bytes | memoryview, seal: Seal) -> None:
    """Replace the file at `path` atomically: a kill at any instant leaves the old file or the new file.

    Raises StoreFullError, StoreReadOnlyError.
    """
    text = json.dumps(header._asdict(), sort_keys=True).encode()
    length = struct.pack("<Q", len(text))
    mark, parts = seal.of(_NAME).close(length + text, [memoryview(payload)])
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        if is_leftover(leftover, older_than_s=0):
            leftover.unlink(missing_ok=True)
    with atomic_write(path) as file:
        write_all(file, MAGIC + mark + length + text)
        for part in parts:
            write_all(file, part)


def read_index(path: Path, seal: Seal) -> tuple[IndexHeader, memoryview]:
    """Return the file's header and the bytes for FAISS. Raises DamagedIndexError unless every byte is as written."""
    try:
        data = memoryview(bytearray(path.read_bytes()))
    except OSError as error:
        raise DamagedIndexError(f"{path}: cannot be read ({error.strerror}); it is rebuilt from the store") from error
    if len(data) < _BODY + 8 or data[: len(MAGIC)] != MAGIC:
        raise DamagedIndexError(f"{path}: not a vector index of this version; it is rebuilt from the store")
    (length,) = struct.unpack_from("<Q", data, _BODY)
    start, end = _BODY + 8, min(_BODY + 8 + length, len(data))
    if not seal.of(_NAME).opens(bytes(data[len(MAGIC) : _BODY]), bytes(data[_BODY:end]), data[end:]):
        raise DamagedIndexError(f"{path}: damaged, or not sealed by this store; it is rebuilt from the store")
    return IndexHeader(**json.loads(bytes(data[start:end]))), data[end:]
