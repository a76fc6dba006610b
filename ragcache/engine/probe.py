"""Measures a machine in a fraction of a second, when a store is opened."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from ragcache.codecs import Codec
from ragcache.engine.rates import RateFigures, Rates, machine_key
from ragcache.files import PAGE, read_at
from ragcache.kv.block import example_block
from ragcache.kv.block_key import Recipe
from ragcache.models.kvzip import replay_ids
from ragcache.models.language_model import LanguageModel
from ragcache.store.prefill_rate import PrefillRate

T = TypeVar("T")
WHOLE = Recipe()
WARM_TOKENS = 16
MOST_TOKENS = 512
READ_BYTES = 256 << 10
MOST_READ_BYTES = 16 << 20
COPIED_BYTES = 8 << 20
DECODED_TOKENS = 256
LOOKED_AT = 8
PROBED = ("disk", "memory")
# Shares of the time budget; the rest is for memory and codec.
MODEL_SHARE, DISK_SHARE = 0.6, 0.3


def probe(
    rates: Rates, lm: LanguageModel, codec: Codec, block_file: Path | None, budget_s: float, recipe: Recipe = WHOLE
) -> None:
    """Measure prefill, disk, memory and the codec's decoding, in about `budget_s` seconds.

    Each step that was begun is finished: at least 16 tokens run, and a block of 256 KiB is read.

    block_file: read past the page cache if the file system allows it; None leaves the disk out
    """
    rates.compute.set(probe_prefill(lm, MODEL_SHARE * budget_s, recipe))
    _measure_disk(rates, block_file, budget_s)
    rates.tier("memory").set(0.0, probe_memory())
    rates.decode_bytes_s[codec.name] = probe_decode(lm, codec)


def _measure_disk(rates: Rates, block_file: Path | None, budget_s: float) -> None:
    with suppress(OSError):  # deleted meanwhile or unreadable; a question will find out
        if block_file is not None:
            rates.tier("disk").set(*probe_disk(block_file, DISK_SHARE * budget_s))


def probe_prefill(lm: LanguageModel, budget_s: float, recipe: Recipe = WHOLE) -> PrefillRate:
    """Measure prefill with a short warm-up pass, which decides the length of a second pass.

    recipe: of the store's chunks
    """
    alone = Recipe(kept=recipe.kept, task=recipe.task)
    room = lm.max_positions - 1 - len(replay_ids(lm, alone, ()))
    longest = max(1, min(MOST_TOKENS, room if alone.is_dense else room // 2))

    def encode_s(num_tokens: int) -> float:
        ids = [1 + rank % min(100, lm.vocab_size - 1) for rank in range(num_tokens)]

        def encode() -> None:
            lm.encode([ids], alone)
            lm.finish()

        return timed(encode)[0]

    few = min(WARM_TOKENS, longest)
    first_s = encode_s(few)
    many = min(longest, max(few, int(few * (budget_s - first_s) / max(first_s, 1e-6))))
    many_s = encode_s(many) if many > few or first_s < budget_s else first_s
    return PrefillRate(many_s / many, 0.0)


def probe_disk(path: Path, budget_s: float) -> tuple[float, float]:
    """Return latency in seconds and bytes/s of reading a file, from the device itself if O_DIRECT is available.

    It reads single pages, then a first part, and then as much as the time allows in a single read, as the store reads
    blocks.
    """
    with open(path, "rb", buffering=0) as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        room = -(-max(1, min(size, MOST_READ_BYTES)) // PAGE) * PAGE
        # Aligned to a page, as O_DIRECT requires, and already populated, as page-locked memory is.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        buffer = memoryview(mmap.mmap(-1, room, flags))
        page = partial(read_at, descriptor, 0, 1, buffer[:PAGE])
        try:  # some file systems refuse O_DIRECT only at a read; it stays on for all later reads
            latency_s, _ = timed(partial(page, direct=True))
        except OSError:
            if hasattr(os, "posix_fadvise"):  # the next best: drop it from the page cache
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            latency_s, _ = timed(page)

        def read(offset: int, most: float) -> tuple[float, int]:
            return timed(partial(os.preadv, descriptor, [buffer[: int(most) // PAGE * PAGE]], offset))

        if size <= PAGE:
            return latency_s, READ_BYTES / max(1e-12, latency_s)
        for quarter in (1, 2, 3):
            latency_s = min(latency_s, read(size * quarter // 4 // PAGE * PAGE, PAGE)[0])
        seconds, moved = read(PAGE, READ_BYTES)
        rate, end = _rate(seconds, moved, latency_s), PAGE + moved
        left = rate * (budget_s - latency_s - seconds)
        if end < size and left > READ_BYTES:
            rate = _rate(*read(end, min(room, left)), latency_s)
        return latency_s, rate


def _rate(seconds: float, moved: int, latency_s: float) -> float:
    return moved / max(seconds - latency_s, seconds / 4, 1e-9)


def probe_memory() -> float:
    """Return the bytes/s of a copy in host memory."""
    source = torch.ones(COPIED_BYTES // 4)
    place = torch.empty_like(source).copy_(source)
    return COPIED_BYTES / _fastest_s(lambda: place.copy_(source))


def probe_decode(lm: LanguageModel, codec: Codec) -> float:
    """Return the bytes/s of decoded KV, measured on the first layer of a block."""
    example = example_block(lm.shape.layers[:1], DECODED_TOKENS, lm.dtype)
    codec = codec.for_trial(example)
    block = codec.decode(codec.encode(example))
    key_place, value_place = torch.empty_like(example.keys[0]), torch.empty_like(example.values[0])

    def place() -> None:
        block.copy_keys(0, key_place)
        block.copy_values(0, value_place)

    return example.num_bytes / _fastest_s(place)


def _fastest_s(work: Callable[[], object]) -> float:
    return max(min(timed(work)[0] for _ in range(3)), 1e-9)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that `work` took, and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def open_rates(
    path: Path, kv_root: Path, lm: LanguageModel, codec: Codec, budget_s: float, recipe: Recipe = WHOLE
) -> Rates:
    """Return rates for a store that was just opened: earlier measurements of this machine, else a probe's.

    path: the file of rates

    The disk is measured at every opening, because a disk with a slow rate is not read from, so no read would correct
    the rate. For the same reason a remote's rate is not taken from earlier processes; its first read measures it.
    Nothing is measured in a store without blocks, which has nothing to choose, nor with a budget of 0.
    """
    rates = Rates()
    known = RateFigures.read(path, machine_key(lm))
    if known is not None:
        rates.restore(replace(known, tiers={name: known.tiers[name] for name in PROBED if name in known.tiers}))
    few = list(islice(kv_root.glob("*/*/*.safetensors"), LOOKED_AT)) if budget_s else []
    block_file = max(few, key=_size, default=None)
    if block_file is not None and known is None:
        probe(rates, lm, codec, block_file, budget_s, recipe)
    elif block_file is not None:
        _measure_disk(rates, block_file, budget_s)
    return rates


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
