"""Time to live, by a clock of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blocks import make_block, make_key, size_of, tier_of

from ragcache.store.kv_store import KVStore
from ragcache.store.retention import Expiry

KEY = make_key(0)


class Clocks:
    """monotonic never jumps; wall may."""

    def __init__(self, at: float = 1_000_000.0) -> None:
        self.monotonic = 50.0
        self.wall = at

    def pass_(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


def open_store(root: Path, clocks: Clocks, ttl_s: float = 100.0, *, read_only: bool = False) -> KVStore:
    store = KVStore(root, ttl_s=ttl_s, read_only=read_only)
    store._expiry = Expiry(
        ttl_s, store._durable, writable=not read_only, clock=lambda: clocks.monotonic, wall=lambda: clocks.wall
    )
    return store


def test_what_is_not_used_for_so_long_is_dropped_from_every_tier(tmp_path: Path) -> None:
    clocks = Clocks()
    with open_store(tmp_path, clocks) as store:
        store.put(KEY, make_block(0))
        for _ in range(5):
            clocks.pass_(99)
            assert store.get(KEY) is not None, "each use prolongs it"
        clocks.pass_(100)
        assert (tier_of(store, KEY), size_of(store, KEY), KEY in store) == (None, None, False)
        assert store.get(KEY) is None
        assert store.stats().bytes_by_tier == {"memory": 0, "disk": 0}
        assert store.put(KEY, make_block(0)).equal(make_block(0))
        assert store.get(KEY) is not None


def test_use_in_memory_counts_for_those_who_open_the_store_later(tmp_path: Path) -> None:
    clocks = Clocks()
    with open_store(tmp_path, clocks) as store:
        store.put(KEY, make_block(0))
        store.put(make_key(1), make_block(1))
        clocks.pass_(90)
        assert store.get(KEY) is not None
    clocks.pass_(20)
    with open_store(tmp_path, clocks) as store:
        assert store.get(KEY) is not None
        assert store.get(make_key(1)) is None


def test_a_sweep_drops_what_nobody_touches_and_pins_stay(tmp_path: Path) -> None:
    clocks = Clocks()
    with open_store(tmp_path, clocks) as store:
        for number in range(3):
            store.put(make_key(number), make_block(number))
        store.pin([make_key(2)])
        clocks.pass_(150)
        assert sorted(store.expire()) == sorted([make_key(0), make_key(1)])
        assert list(store.keys()) == [make_key(2)]
        store.unpin([make_key(2)])
        store.sweep()
        assert list(store.keys()) == []


@pytest.mark.parametrize("jump", [-500_000.0, 500_000.0])
def test_a_clock_that_jumps_while_the_process_runs_shows_nowhere(tmp_path: Path, jump: float) -> None:
    clocks = Clocks()
    with open_store(tmp_path, clocks) as store:
        store.put(KEY, make_block(0))
        clocks.wall += jump
        clocks.pass_(99)
        assert store.get(KEY) is not None
        clocks.wall -= 2 * jump
        clocks.pass_(99)
        assert store.get(KEY) is not None
        clocks.pass_(100)
        assert store.get(KEY) is None


def test_files_from_the_future_count_as_used_now(tmp_path: Path) -> None:
    """The clock went back between two processes."""
    clocks = Clocks()
    with open_store(tmp_path, clocks) as store:
        store.put(KEY, make_block(0))
    clocks.wall -= 500_000
    with open_store(tmp_path, clocks) as store:
        assert store.get(KEY) is not None
        assert os.stat(store._durable.path(KEY)).st_mtime == pytest.approx(clocks.wall)
    clocks.pass_(101)
    with open_store(tmp_path, clocks) as store:
        assert store.get(KEY) is None, "it does not live for ever"


def test_a_clock_that_went_forward_between_two_processes_costs_a_computation(tmp_path: Path) -> None:
    clocks = Clocks()
    with open_store(tmp_path, clocks) as store:
        store.put(KEY, make_block(0))
    clocks.wall += 500_000
    with open_store(tmp_path, clocks) as store:
        assert store.get(KEY) is None
        store.put(KEY, make_block(0))
        clocks.pass_(50)
        assert store.get(KEY) is not None


def test_a_reader_serves_nothing_old_and_changes_nothing(tmp_path: Path) -> None:
    clocks = Clocks()
    with open_store(tmp_path, clocks) as store:
        store.put(KEY, make_block(0))
        path = store._durable.path(KEY)
    before = path.stat()
    clocks.pass_(50)
    with open_store(tmp_path, clocks, read_only=True) as reader:
        assert reader.get(KEY) is not None
        clocks.pass_(150)
        assert reader.get(KEY) is None
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
