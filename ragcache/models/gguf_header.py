"""The header of a GGUF file: its metadata, and the places of its tensors."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ragcache.errors import UnsupportedModelError

MAGIC = b"GGUF"
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY, FLOAT32 = 8, 9, 0


class TensorPlace(NamedTuple):
    """A tensor in the file.

    shape: outermost dimension first
    kind:  GGUF's number of the tensor's type
    start: offset in the file, in bytes
    """

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """A GGUF file's metadata and the places of its tensors. An array of strings is reduced to its length."""

    path: Path
    keys: dict[str, Any]
    tensors: dict[str, TensorPlace]

    @property
    def architecture(self) -> str:
        return str(self.keys["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's key, named without the architecture."""
        return self.keys.get(f"{self.architecture}.{key}", default)

    def floats(self, tensor: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a float32 tensor's values. Raises UnsupportedModelError for another type."""
        place = self.tensors[tensor]
        if place.kind != FLOAT32:
            raise UnsupportedModelError(f"{self.path} is not supported: {tensor} is not in float32")
        return np.fromfile(self.path, np.float32, math.prod(place.shape), offset=place.start)

    @property
    def num_values(self) -> int:
        return sum(math.prod(place.shape) for place in self.tensors.values())


def read_header(path: Path) -> Header:
    """Read a GGUF file's metadata. Raises ValueError for a file that is not GGUF or is cut short, OSError."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} does not start with GGUF's magic bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).header(path)
            except (struct.error, KeyError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is cut short or damaged in its metadata") from error


class _Reader:
    """A reader of values from a file's bytes, from the start on."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def header(self, path: Path) -> Header:
        version, num_tensors, num_keys = self._numbers("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF v{version}, not v2 or v3")
        keys = {}
        for _ in range(num_keys):
            name = self._string()
            keys[name] = self._value(*self._numbers("<I"))
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = keys.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        return Header(path, keys, {name: place._replace(start=base + place.start) for name, place in infos})

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._numbers("<Q")
        end = self._at + length
        if end > len(self._data):
            raise struct.error("a string goes beyond the end")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise struct.error(f"type {kind}")
        kind, count = self._numbers("<IQ")
        if kind in SCALARS:
            return list(self._numbers(f"<{count}{SCALARS[kind][1]}"))
        if kind != STRING:
            raise struct.error(f"an array of type {kind}")
        for _ in range(count):
            (length,) = self._numbers("<Q")
            self._at += length
        return count

    def _tensor(self) -> tuple[str, TensorPlace]:
        name = self._string()
        (rank,) = self._numbers("<I")
        shape = self._numbers(f"<{rank}Q")
        kind, start = self._numbers("<IQ")
        return name, TensorPlace(tuple(reversed(shape)), kind, start)
