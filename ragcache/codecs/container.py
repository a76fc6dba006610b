"""A safetensors file with a seal over every byte of the file, mapped or read.

    bytes 0-7      length of the header, little endian, unsigned
    header         JSON: {"__metadata__": {"seal": "<mark>", ...}, "<tensor>": {dtype, shape,
                   data_offsets}, ...}, padded with spaces so that the data begins at a multiple of 64, or of 4096 in
                   files of a megabyte and more, as reads that bypass the page cache require
    data           the tensors: first those whose size is a multiple of 64 bytes, each of which begins at a multiple of
                   64, as a GPU's kernel requires; then the others, wide dtypes first, so that each is aligned to its
                   element size

Any safetensors reader can open it, unless the store encrypts its data. The mark (`ragcache.seal`) covers the whole
file, with zeros in its own place. It is the first entry and so has the same place in every file, and it is checked
before anything is parsed. Every later format version keeps that place, so that a newer file can be distinguished from
a damaged file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ragcache.errors import FAILED, DamagedBlockError, MissingBlockError, StoreError
from ragcache.files import PAGE, Rename, atomic_write, write_all
from ragcache.lazy_torch import Tensor, torch
from ragcache.seal import MARK_LENGTH, UNSEALED, FileSeal

ALIGNMENT = 64
# PyTorch's name for each safetensors name.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PREFIX = b'{"__metadata__":{"seal":"'
_MARK = slice(8 + len(_PREFIX), 8 + len(_PREFIX) + MARK_LENGTH)
_ZEROS = b"0" * MARK_LENGTH
_LARGE = 1 << 20
# Linux's MADV_POPULATE_READ (5.14): map all pages at once instead of a fault for every 16. Python does not define it.
_MADV_POPULATE_READ = 22


Reserve = Callable[[BinaryIO, int], None]
# Reads (descriptor, offset, num_bytes) of an open file into uint8 [num_bytes]; returns None to have the file mapped.
Load = Callable[[int, int, int], "Tensor | None"]
NO_STORE = UNSEALED.of("")
"""The seal of a file outside of stores."""


class Container(NamedTuple):
    """The content of a container.

    tensors:  alias the bytes (of a file: copy on write), and keep them alive
    metadata: without the seal
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def write_container(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    reserve: Reserve | None = None,
    rename: Rename | None = None,
    seal: FileSeal = NO_STORE,
) -> None:
    """Write tensors and metadata to `path`, either completely or not at all, flushed to the device.

    reserve: called with the temporary file, still empty, and the bytes that it will have; an error that it raises stops
           the writing and leaves no file
    rename:  gives the written file its final name

    Raises StoreFullError, StoreReadOnlyError.
    """
    buffers = pack_container(tensors, metadata, seal)
    with atomic_write(path, rename=rename) as file:
        if reserve is not None:
            reserve(file, sum(buffer.nbytes for buffer in buffers))
        for buffer in buffers:
            write_all(file, buffer)


def pack_container(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], seal: FileSeal = NO_STORE
) -> list[memoryview]:
    """Return the bytes of a container, in order. They alias the tensors, unless they are encrypted."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT > 0, -item[1].itemsize, item[0]))
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in ordered]
    buffers = [memoryview(tensor.numpy()) for tensor in flat]  # type: ignore[arg-type]
    header = bytearray(_header(ordered, metadata))
    header[_MARK], buffers = seal.close(header, buffers)
    return [memoryview(header), *buffers]


def read_container(path: Path, load: Load | None = None, seal: FileSeal = NO_STORE) -> Container:
    """Map a file, or `load` its data, check the seal and return views of the bytes that were checked.

    The map is private: writing to a tensor changes neither the file nor the tensors of other readers.

    Raises MissingBlockError, DamagedBlockError (any byte is wrong, missing, or unreadable), StoreError (no permission,
    no descriptors).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingBlockError(f"{path}: no such block") from error
    except OSError as error:
        raise _unreadable(path, error, "opened") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size < _MARK.stop:
            raise DamagedBlockError(f"{path}: cut off, or no block at all; the block has to be computed again")
        if load is not None:
            head = os.pread(descriptor, _end_of_head(os.pread(descriptor, 8, 0), status.st_size), 0)
            if (data := load(descriptor, len(head), status.st_size - len(head))) is not None:
                return _unpack(str(path), head, data, seal)
        return unpack_container(str(path), _map(descriptor, status.st_size), seal)
    except OSError as error:
        raise _unreadable(path, error, "read") from error
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError, way: str) -> StoreError:
    if error.errno in FAILED:
        return DamagedBlockError(f"{path}: cannot be {way} ({error.strerror}); the block has to be computed again")
    return StoreError(f"{path}: cannot be {way} ({error.strerror}); check its permissions")


def unpack_container(where: str, data: mmap.mmap | bytearray, seal: FileSeal = NO_STORE) -> Container:
    """Check the seal of a container's bytes and return its tensors as views of the bytes.

    where: name of the source in errors

    Raises DamagedBlockError if any byte is wrong or missing.
    """
    end = _end_of_head(data[:8], len(data))
    rest = (
        torch.frombuffer(data, dtype=torch.uint8, offset=end) if end < len(data) else torch.empty(0, dtype=torch.uint8)
    )
    return _unpack(where, data[:end], rest, seal)


def _map(descriptor: int, num_bytes: int) -> mmap.mmap:
    # Copy on write: torch warns about read-only buffers, and a file must not be changed through a tensor.
    mapped = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
    if hasattr(mapped, "madvise"):
        try:
            mapped.madvise(_MADV_POPULATE_READ)
        except OSError:  # an older kernel, or another system: pages are mapped one by one
            mapped.madvise(mmap.MADV_WILLNEED)
    return mapped


def _header(tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"seal": _ZEROS.decode(), **metadata}}
    begin = 0
    for name, tensor in tensors:
        end = begin + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % (PAGE if begin >= _LARGE else ALIGNMENT))
    return struct.pack("<Q", len(text)) + text


def _end_of_head(length: bytes | bytearray, num_bytes: int) -> int:
    """Return the bytes before the data in a file of `num_bytes`. length: its first 8 bytes, which may be damaged"""
    return min(8 + int.from_bytes(length, "little"), num_bytes)


def _unpack(where: str, head: bytes | bytearray, data: Tensor, seal: FileSeal) -> Container:
    mark, blank = bytes(head[_MARK]), head[: _MARK.start] + _ZEROS + head[_MARK.stop :]
    view = memoryview(data.numpy())  # type: ignore[arg-type]
    if head[8 : _MARK.start] != _PREFIX or not seal.opens(mark, blank, view):
        raise DamagedBlockError(
            f"{where}: damaged, or not sealed by this store under this name; the block has to be computed again"
        )
    try:  # the seal has been checked, so an invalid header is not damage: it was written like this
        header = json.loads(head[8:])
        metadata: dict[str, str] = header.pop("__metadata__")
        del metadata["seal"]
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("its metadata are not all texts")
        tensors = {name: _tensor(data, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise DamagedBlockError(f"{where}: not a block file ({error}); the block has to be computed again") from error
    return Container(tensors, metadata)


def _tensor(data: Tensor, entry: dict[str, Any]) -> Tensor:
    dtype, shape = getattr(torch, DTYPES[entry["dtype"]]), entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(type(size) is int for size in shape):  # a text or a list would be repeated by the product
        raise TypeError("a tensor's shape is no list of whole numbers")
    count = math.prod(shape)
    if not 0 <= begin <= end <= len(data) or end - begin != count * dtype.itemsize:
        raise ValueError("a tensor's shape and bytes disagree")
    return data[begin:end].view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
