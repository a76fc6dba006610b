"""Law 8: a damaged block is never served. It is reported and dropped, and can be computed again."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from blocks import DTYPES, make_block, make_key

from ragcache.store.kv_store import KVStore

NUM_BLOCKS = 600


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    position, bit = rng.randrange(len(data)), rng.randrange(8)
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def flip_header_bit(data: bytes, rng: random.Random) -> bytes:
    return flip_bit(data[:200], rng) + data[200:]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def zero_a_page(data: bytes, rng: random.Random) -> bytes:
    """What a file system that lost a page after a power cut shows."""
    start = rng.randrange(0, len(data) - 64, 64)
    return data[:start] + bytes(64) + data[start + 64 :]


def append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 100))


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [flip_bit, flip_header_bit, truncate, zero_a_page, append]


def path_of(root: Path, key: str) -> Path:
    return root / key[:2] / key[2:4] / f"{key}.safetensors"


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """600 blocks in tmp_path, two of three damaged: the kind of damage by the block's number."""
    rng = random.Random(1)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)  # for speed: nothing here is about power cuts
        with KVStore(tmp_path, memory_bytes=0) as store:
            for number in range(NUM_BLOCKS * 3 // 2):
                store.put(make_key(number), make_block(number, num_tokens=number % 5, dtype=DTYPES[number % 3]))
    kinds = {}
    for number in range(NUM_BLOCKS * 3 // 2):
        if number % 3:
            damage, path = DAMAGES[rng.randrange(len(DAMAGES))], path_of(tmp_path, make_key(number))
            path.write_bytes(damage(path.read_bytes(), rng))
            kinds[number] = damage.__name__
    return kinds


def test_none_of_600_damaged_blocks_is_served(
    tmp_path: Path, damaged: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    numbers = range(NUM_BLOCKS * 3 // 2)
    assert len(damaged) == NUM_BLOCKS
    assert len(set(damaged.values())) == len(DAMAGES)
    with KVStore(tmp_path) as store, caplog.at_level(logging.WARNING):
        loads = [store.get(make_key(number)) for number in numbers]
        for number, load in zip(numbers, loads, strict=True):
            assert (load is None) == (number in damaged), damaged.get(number, "served, and is not damaged")
            if load is not None:
                assert load.block.equal(make_block(number, num_tokens=number % 5, dtype=DTYPES[number % 3]))
        assert store.stats().damaged == NUM_BLOCKS
        reported = " ".join(record.getMessage() for record in caplog.records)
        assert all(make_key(number) in reported for number in damaged)
        assert sorted(store.keys()) == sorted(make_key(number) for number in numbers if number not in damaged)
        assert not any(path_of(tmp_path, make_key(number)).exists() for number in damaged)
        again = next(iter(damaged))
        store.put(make_key(again), make_block(again))
    with KVStore(tmp_path) as store:
        loaded = store.get(make_key(again))
        assert loaded is not None
        assert loaded.block.equal(make_block(again))
