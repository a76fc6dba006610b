"""The tiers together: what they keep, and for how long."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from blocks import make_block, make_key, put_all, same, served_from, size_of, tier_of
from kit.makers import made_by
from tiny_disk import run_on_tiny_disk

from ragcache import errors
from ragcache.codecs.container import read_container, write_container
from ragcache.seal import UNSEALED
from ragcache.store.counters import KVStats
from ragcache.store.kv_store import KVStore
from ragcache.store.retention import Expiry

KEY = make_key(1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(root: Path) -> Iterator[KVStore]:
    with KVStore(root) as store:
        yield store


def path_of(root: Path, key: str) -> Path:
    return root / key[:2] / key[2:4] / f"{key}.safetensors"


def damage(root: Path, key: str) -> None:
    data = bytearray(path_of(root, key).read_bytes())
    data[-1] ^= 1
    path_of(root, key).write_bytes(data)


def test_size_is_what_a_read_from_the_fastest_tier_moves(root, store):
    block = make_block(1)
    assert size_of(store, KEY) is None
    store.put(KEY, block)
    assert size_of(store, KEY) == block.num_bytes
    with KVStore(root) as other:
        assert size_of(other, KEY) == path_of(root, KEY).stat().st_size
        assert [tier_of(other, KEY), tier_of(other, KEY), KEY in other] == ["disk", "disk", True], (
            "looking changes nothing"
        )
        assert other.stats().hits_by_tier == {"memory": 0, "disk": 0}
    assert tier_of(store, KEY) == "memory"


@pytest.mark.parametrize("way", ["get", "put"])
def test_a_block_deleted_while_it_is_kept_does_not_stay_in_memory(root, store, monkeypatch, way):
    """It is on disk, and not in memory yet, when the deletion comes."""
    store.put(KEY, make_block(1))
    with KVStore(root) as other:
        read, go = threading.Event(), threading.Event()
        memory = other._tiers.memory
        hold = memory._hold

        def slow_hold(*arguments):
            read.set()
            go.wait(10)
            return hold(*arguments)

        monkeypatch.setattr(memory, "_hold", slow_hold)
        with ThreadPoolExecutor(2) as threads:
            loading = threads.submit(other.get, KEY) if way == "get" else threads.submit(other.put, KEY, make_block(1))
            assert read.wait(10)
            deleting = threads.submit(other.delete, KEY)
            time.sleep(0.05)
            go.set()
            deleting.result(10)
            loading.result(10)
        assert tier_of(other, KEY) is None


def test_a_damaged_block_is_reported_dropped_and_not_served(root, store, caplog):
    store.put(KEY, make_block(1))
    damage(root, KEY)
    assert served_from(store, KEY, make_block(1)) == "memory", "a whole copy is"
    with KVStore(root) as other, caplog.at_level(logging.WARNING):
        with pytest.raises(errors.DamagedBlockError, match=KEY):
            other.verify(KEY)
        assert tier_of(other, KEY) == "disk", "verify drops nothing"
        assert other.get(KEY) is None
        assert KEY in caplog.text
        assert tier_of(other, KEY) is None
        assert not path_of(root, KEY).exists()
        assert (other.stats().damaged, other.stats().misses) == (1, 1)
        other.put(KEY, make_block(1))
        other.verify(KEY)


def test_a_read_only_store_serves_and_changes_nothing(root, store):
    put_all(store, (1, 2))
    damage(root, make_key(2))
    before = sorted(root.rglob("*"))
    with KVStore(root, read_only=True) as reader:
        assert served_from(reader, KEY, make_block(1)) == "disk"
        assert reader.get(make_key(2)) is None
        for action in (lambda: reader.put(KEY, make_block(1)), lambda: reader.delete(KEY), reader.sweep):
            with pytest.raises(errors.StoreReadOnlyError, match="read-only"):
                action()
        reader.put(make_key(3), make_block(3), "memory")
        assert served_from(reader, make_key(3), make_block(3)) == "memory"
        assert reader.stats().damaged == 1
    assert sorted(root.rglob("*")) == before


def test_a_damaged_block_that_cannot_be_removed_is_still_not_served(root, store, monkeypatch, caplog):
    store.put(KEY, make_block(1))
    damage(root, KEY)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with KVStore(root) as other:
        assert other.get(KEY) is None
        assert other.get(KEY) is None
    assert "cannot be removed" in caplog.text


def test_a_newer_versions_block_is_refused_and_stays(root, store):
    store.put(KEY, make_block(1))
    seal = UNSEALED.of(KEY)
    tensors, metadata = read_container(path_of(root, KEY), seal=seal)
    write_container(path_of(root, KEY), tensors, {**metadata, "codec_version": "7"}, seal=seal)
    with KVStore(root) as other:
        for action in (lambda: other.get(KEY), lambda: other.verify(KEY)):
            with pytest.raises(errors.SchemaVersionError, match="version 7 of codec 'raw'"):
                action()
        assert tier_of(other, KEY) == "disk"


def test_statistics_are_those_of_what_happened(root):
    one = make_block(1).num_bytes
    with KVStore(root, memory_bytes=2 * one) as store:
        put_all(store, range(3))
        assert served_from(store, make_key(2), make_block(2)) == "memory"
        assert served_from(store, make_key(0), make_block(0)) == "disk"
        assert store.get(make_key(9)) is None
        on_disk = sum(path_of(root, make_key(number)).stat().st_size for number in range(3))
        assert store.stats() == KVStats(
            blocks=3,
            bytes_by_tier={"memory": 2 * one, "disk": on_disk},
            hits_by_tier={"memory": 1, "disk": 1},
            misses=1,
            damaged=0,
            evictions=2,
        )
        assert sorted(store.keys()) == sorted(make_key(number) for number in range(3))


def test_sweep_removes_leftovers_of_dead_writers(root, store):
    store.put(KEY, make_block(1))
    directory = path_of(root, KEY).parent
    old, ours = (directory / f".x.safetensors.{pid}-0123abcd.tmp" for pid in (2**22 + 1, os.getpid()))
    for path in (old, ours):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert list(store.keys()) == [KEY]
    assert store.sweep() == 1
    assert (old.exists(), ours.exists()) == (False, True)
    store.verify(KEY)


BAD_OPTIONS = [
    ({"codec": "zip"}, "'zip'.*raw"),
    ({"eviction": "random"}, "'random'.*lru"),
    ({"admission": "bouncer"}, "'bouncer'.*all, tinylfu"),
    ({"memory_bytes": -1}, "memory_bytes is -1"),
    ({"disk_bytes": -1}, "disk_bytes is -1"),
    ({"device_bytes": -1}, "device_bytes is -1"),
    ({"ttl_s": 0.0}, "a time to live of 0.0 s"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS)
def test_bad_options_are_refused(root, options, words):
    with pytest.raises(errors.ConfigError, match=words):
        KVStore(root, **options).use_device(torch.device("cpu"))
    assert not root.exists()


FULL_DISK = """
from ragcache.errors import StoreFullError
from ragcache.store.kv_store import KVStore
root, written = disk / "kv", 0
with KVStore(root) as store:
    with pytest.raises(StoreFullError) as full:
        while written < 1000:
            store.put(make_key(written), make_block(written, num_tokens=200))
            written += 1
    assert make_key(written) in str(full.value)
    assert written > 3
    assert not list(root.rglob("*.tmp"))
    assert store.get(make_key(written)) is None
    store.delete(make_key(0))
    store.put(make_key(1001), make_block(1001))
with KVStore(root) as store:
    assert sorted(store.keys()) == sorted(make_key(n) for n in [*range(1, written), 1001])
    for key in store.keys():
        store.verify(key)
"""


def test_a_disk_that_takes_nothing_more(tmp_path):
    run_on_tiny_disk(tmp_path, FULL_DISK)


@pytest.mark.parametrize("deleted", [False, True])
def test_what_was_deleted_meanwhile_is_passed_on_and_not_kept(tmp_path, deleted):
    """Somebody computed a block that the disk had when he began."""
    with KVStore(tmp_path) as store:
        store.put(make_key(1), make_block(1))
        if deleted:
            store.delete(make_key(1))
        assert same(store.put(make_key(1), make_block(1), "nowhere"), make_block(1))
        assert store.lookup([make_key(1)], "memory").keys() == (set() if deleted else {make_key(1)})
        assert same(store.put(make_key(1), make_block(1), "again"), make_block(1))
        assert tier_of(store, make_key(1)) == (None if deleted else "memory")


# Time to live, by a clock of the test's own


OLD = make_key(0)


class Clocks:
    """monotonic never jumps; wall may."""

    def __init__(self, at: float = 1_000_000.0) -> None:
        self.monotonic = 50.0
        self.wall = at

    def pass_(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


clocks = made_by(Clocks, scope="function")


def open_store(root: Path, clocks: Clocks, ttl_s: float = 100.0, *, read_only: bool = False) -> KVStore:
    store = KVStore(root, ttl_s=ttl_s, read_only=read_only)
    store._expiry = Expiry(
        ttl_s, store._durable, writable=not read_only, clock=lambda: clocks.monotonic, wall=lambda: clocks.wall
    )
    return store


def test_what_is_not_used_for_so_long_is_dropped_from_every_tier(tmp_path, clocks):
    with open_store(tmp_path, clocks) as store:
        store.put(OLD, make_block(0))
        for _ in range(5):
            clocks.pass_(99)
            assert store.get(OLD) is not None, "each use prolongs it"
        clocks.pass_(100)
        assert (tier_of(store, OLD), size_of(store, OLD), OLD in store) == (None, None, False)
        assert store.get(OLD) is None
        assert store.stats().bytes_by_tier == {"memory": 0, "disk": 0}
        assert same(store.put(OLD, make_block(0)), make_block(0))
        assert store.get(OLD) is not None


def test_use_in_memory_counts_for_those_who_open_the_store_later(tmp_path, clocks):
    with open_store(tmp_path, clocks) as store:
        store.put(OLD, make_block(0))
        store.put(make_key(1), make_block(1))
        clocks.pass_(90)
        assert store.get(OLD) is not None
    clocks.pass_(20)
    with open_store(tmp_path, clocks) as store:
        assert store.get(OLD) is not None
        assert store.get(make_key(1)) is None


def test_a_sweep_drops_what_nobody_touches_and_pins_stay(tmp_path, clocks):
    with open_store(tmp_path, clocks) as store:
        put_all(store, range(3))
        store.pin([make_key(2)])
        clocks.pass_(150)
        assert sorted(store.expire()) == sorted([make_key(0), make_key(1)])
        assert list(store.keys()) == [make_key(2)]
        store.unpin([make_key(2)])
        store.sweep()
        assert list(store.keys()) == []


@pytest.mark.parametrize("jump", [-500_000.0, 500_000.0])
def test_a_clock_that_jumps_while_the_process_runs_shows_nowhere(tmp_path, jump, clocks):
    with open_store(tmp_path, clocks) as store:
        store.put(OLD, make_block(0))
        clocks.wall += jump
        clocks.pass_(99)
        assert store.get(OLD) is not None
        clocks.wall -= 2 * jump
        clocks.pass_(99)
        assert store.get(OLD) is not None
        clocks.pass_(100)
        assert store.get(OLD) is None


def test_files_from_the_future_count_as_used_now(tmp_path, clocks):
    """The clock went back between two processes."""
    with open_store(tmp_path, clocks) as store:
        store.put(OLD, make_block(0))
    clocks.wall -= 500_000
    with open_store(tmp_path, clocks) as store:
        assert store.get(OLD) is not None
        assert os.stat(store._durable.path(OLD)).st_mtime == pytest.approx(clocks.wall)
    clocks.pass_(101)
    with open_store(tmp_path, clocks) as store:
        assert store.get(OLD) is None, "it does not live for ever"


def test_a_clock_that_went_forward_between_two_processes_costs_a_computation(tmp_path, clocks):
    with open_store(tmp_path, clocks) as store:
        store.put(OLD, make_block(0))
    clocks.wall += 500_000
    with open_store(tmp_path, clocks) as store:
        assert store.get(OLD) is None
        store.put(OLD, make_block(0))
        clocks.pass_(50)
        assert store.get(OLD) is not None


def test_a_reader_serves_nothing_old_and_changes_nothing(tmp_path, clocks):
    with open_store(tmp_path, clocks) as store:
        store.put(OLD, make_block(0))
        path = store._durable.path(OLD)
    before = path.stat()
    clocks.pass_(50)
    with open_store(tmp_path, clocks, read_only=True) as reader:
        assert reader.get(OLD) is not None
        clocks.pass_(150)
        assert reader.get(OLD) is None
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)


def test_accesses_are_counted_by_what_served_them(tmp_path):
    with KVStore(tmp_path / "kv") as store:
        store.put(make_key(0), make_block(0))
        store.count(store.fetch(make_key(0)))
        assert store.fetch(make_key(0)) is not None, "no access, as the caller may not need it"
        store.get(make_key(1))
        assert (store.stats().hits_by_tier["memory"], store.stats().misses) == (1, 1)
