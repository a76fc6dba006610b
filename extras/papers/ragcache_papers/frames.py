"""Entropy-coded bytes: zstandard frames in a row, as two tensors of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
import zstandard

from ragcache.errors import DamagedBlockError
from ragcache.lazy_torch import Tensor, torch

# Huffman coding makes the codes small. Repeated runs are few, and searching for them costs more than it saves: a table
# of 64 entries finds hardly any.
_COMPRESSION = {"min_match": 7, "hash_log": 6}
_OF_THREAD = threading.local()


def pack_frames(parts: Iterable[bytes]) -> dict[str, Tensor]:
    """Return `stream`, uint8, a frame for each part, and `ends`, int64, where each frame ends."""
    coder = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(1, **_COMPRESSION)
    )
    frames = [coder.compress(part) for part in parts]
    ends = torch.tensor([len(frame) for frame in frames], dtype=torch.int64).cumsum(0)
    return {"stream": torch.from_numpy(np.frombuffer(b"".join(frames), dtype=np.uint8).copy()), "ends": ends}


def check_frames(tensors: Mapping[str, Tensor], sizes: Iterable[int]) -> None:
    """Raise DamagedBlockError unless `stream` and `ends` are frames that hold these numbers of bytes."""
    bounds = [0, *tensors["ends"].tolist()]
    if bounds != sorted(bounds) or bounds[-1] != tensors["stream"].numel():
        raise DamagedBlockError("the frames of an entropy-coded block do not end where its stream ends")
    stream = memoryview(tensors["stream"].cpu().numpy())  # type: ignore[arg-type]
    for number, ((start, end), size) in enumerate(zip(pairwise(bounds), sizes, strict=True)):
        _check_size(stream[start:end], number, size)


def read_frame(tensors: Mapping[str, Tensor], number: int, size: int) -> Tensor:
    """Return the bytes of a frame, uint8 [size], on the CPU. Raises DamagedBlockError."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        data = _decoder().decompress(_frame(tensors, number, size))
    except zstandard.ZstdError as error:
        raise DamagedBlockError(f"frame {number} of an entropy-coded block cannot be decoded ({error})") from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decoder() -> zstandard.ZstdDecompressor:
    """Return this thread's decoder: making a decoder takes longer than decoding a frame with it."""
    if not hasattr(_OF_THREAD, "decoder"):
        _OF_THREAD.decoder = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _OF_THREAD.decoder
    return found


def _frame(tensors: Mapping[str, Tensor], number: int, size: int) -> memoryview:
    *before, end = tensors["ends"][max(0, number - 1) : number + 1].tolist()
    start = before[0] if before else 0
    frame = memoryview(tensors["stream"][start:end].cpu().numpy())  # type: ignore[arg-type]
    _check_size(frame, number, size)
    return frame


def _check_size(frame: memoryview, number: int, size: int) -> None:
    try:
        held = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise DamagedBlockError(f"frame {number} of an entropy-coded block is no zstandard frame ({error})") from error
    if held != size:
        raise DamagedBlockError(f"frame {number} of an entropy-coded block holds {held} bytes, not {size}")
