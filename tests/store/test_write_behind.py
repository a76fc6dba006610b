"""Blocks that are written by a thread: bounded, visible at once, and on disk when `flush` says so."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
from blocks import make_block, make_key, same, tier_of
from tiny_disk import run_on_tiny_disk

from ragcache.codecs import RawCodec
from ragcache.errors import StoreFullError
from ragcache.kv.block import KVBlock
from ragcache.store.kv_store import KVStore
from ragcache.store.tiers import DiskTier
from ragcache.store.tiers.write_behind import WriteBehind

ONE = make_block(0).num_bytes


class Gate(DiskTier):
    """A disk that writes when it is let."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, RawCodec())
        self.reached, self.open = threading.Event(), threading.Event()

    def put(self, key: str, block: KVBlock, **how: bool) -> KVBlock | None:
        self.reached.set()
        assert self.open.wait(30)
        return super().put(key, block, **how)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "kv")


def test_put_returns_before_the_disk_has_the_block(gate):
    behind = WriteBehind(gate, 10 * ONE)
    behind.put(make_key(0), make_block(0))
    assert gate.reached.wait(30)
    assert make_key(0) in behind
    assert make_key(0) not in gate
    got = behind.get(make_key(0))
    assert same(got, make_block(0))
    assert behind.unwritten_bytes == ONE
    assert (list(behind.keys()), behind.size(make_key(0))) == ([make_key(0)], ONE)
    assert behind.sizes([make_key(0)], written=True) == {}, "a kill would leave nothing of it"
    gate.open.set()
    behind.flush()
    assert make_key(0) in gate
    assert behind.sizes([make_key(0)], written=True) == {make_key(0): gate.size(make_key(0))}
    assert behind.unwritten_bytes == ONE, "it is in use"
    del got
    assert behind.unwritten_bytes == 0
    behind.close()


def test_put_waits_at_the_bound(gate):
    behind = WriteBehind(gate, 2 * ONE)
    for number in range(2):
        behind.put(make_key(number), make_block(number))
    with ThreadPoolExecutor(1) as threads:
        third = threads.submit(behind.put, make_key(2), make_block(2))
        assert gate.reached.wait(30)
        assert not third.done()
        assert behind.unwritten_bytes == 2 * ONE
        gate.open.set()
        assert third.result(30) is not None
    behind.close()
    assert sorted(gate.keys()) == sorted(make_key(number) for number in range(3))


@pytest.mark.parametrize("missing", [0, 1])
def test_the_bound_holds_to_the_byte(tmp_path, missing):
    """While all that waited is in use, what fits exactly waits beside it; with a byte less it is written at once."""
    disk = DiskTier(tmp_path / "kv", RawCodec())
    lone = WriteBehind(disk, ONE - missing)
    held = [lone.put(make_key(0), make_block(0))]
    assert lone.unwritten_bytes == (0 if missing else ONE)
    behind = WriteBehind(disk, 2 * ONE - missing)
    for number in (1, 2):
        held.append(behind.put(make_key(number), make_block(number)))
        behind.flush()
    assert behind.unwritten_bytes == (ONE if missing else 2 * ONE)
    for tier in (lone, behind):
        tier.close()
    assert len(list(disk.keys())) == len(held)


def test_who_holds_what_waited_writes_the_next_one_himself(gate):
    """Blocks of one question, all in use: no thread waits for itself."""
    gate.open.set()
    behind = WriteBehind(gate, 2 * ONE)
    held = [behind.put(make_key(number), make_block(number)) for number in range(5)]
    assert all(same(block, make_block(number)) for number, block in enumerate(held))
    assert behind.unwritten_bytes <= 2 * ONE
    assert behind.put(make_key(9), make_block(9, num_tokens=50)) is not None
    assert make_key(9) in gate, "larger than the bound: written at once"
    behind.close()


def test_deletion_while_a_block_waits_or_is_written(gate):
    behind = WriteBehind(gate, 10 * ONE)
    for number in range(3):
        behind.put(make_key(number), make_block(number))
    assert gate.reached.wait(30)
    behind.delete(make_key(2))
    with ThreadPoolExecutor(1) as threads:
        deleting = threads.submit(behind.delete, make_key(0))
        gate.open.set()
        deleting.result(30)
    behind.flush()
    assert list(behind.keys()) == list(gate.keys()) == [make_key(1)]
    behind.close()


def test_a_block_that_is_put_again_while_it_is_written_is_written_again(gate):
    behind = WriteBehind(gate, 10 * ONE)
    behind.put(make_key(0), make_block(0))
    assert gate.reached.wait(30)
    behind.put(make_key(0), make_block(1))
    gate.open.set()
    behind.close()
    assert same(gate.get(make_key(0)), make_block(1))


def test_what_cannot_be_written_is_named_and_dropped(tmp_path, monkeypatch, caplog):
    with (
        KVStore(tmp_path, memory_bytes=10 * ONE, write_behind_bytes=10 * ONE) as store,
        caplog.at_level(logging.WARNING),
    ):

        def full(key: str, block: KVBlock, **how: bool) -> KVBlock:
            raise StoreFullError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(store._durable.tier, "put", full)
            for number in range(3):
                assert store.put(make_key(number), make_block(number)).equal(make_block(number))
            with pytest.raises(StoreFullError):
                store.flush([make_key(number) for number in range(3)])
            store.flush([make_key(9)])
        assert caplog.text.count("StoreFullError") == 1
        assert [tier_of(store, make_key(number)) for number in range(3)] == ["memory"] * 3, "questions go on"
        store.put(make_key(3), make_block(3))
        store.flush([make_key(3)])
    assert list(DiskTier(tmp_path, RawCodec()).keys()) == [make_key(3)]


ENDS_WITHOUT_CLOSE = """
import sys, time, torch
from pathlib import Path
from blocks import make_block, make_key
from ragcache.codecs import RawCodec
from ragcache.store.tiers import DiskTier
from ragcache.store.tiers.write_behind import WriteBehind

class Busy(DiskTier):
    def put(self, key, block, **how):
        print("writing", flush=True)
        numbers, end = torch.randn(300, 300), time.monotonic() + 0.5
        while time.monotonic() < end:
            numbers.clone()
        super().put(key, block, **how)
        print("written", flush=True)

behind = WriteBehind(Busy(Path(sys.argv[1]), RawCodec()), 1 << 30)
for number in range(50):
    behind.put(make_key(number), make_block(number))
time.sleep(0.1)
"""


@pytest.mark.parametrize("run", [forked.run, pytest.param(forked.run_real, marks=pytest.mark.slow)])
def test_a_process_that_does_not_close_ends_after_the_block_that_is_being_written(tmp_path, run):
    done = run(ENDS_WITHOUT_CLOSE + forked.END, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["writing", "written"] * (done.stdout.count("written"))
    assert 1 <= done.stdout.count("written") <= 3


def test_the_end_of_a_store_writes_what_waits(tmp_path, monkeypatch):
    with KVStore(tmp_path, write_behind_bytes=20 * ONE, memory_bytes=0) as store:
        disk, put = store._durable.tier, store._durable.tier.put
        monkeypatch.setattr(disk, "put", lambda *given, **how: (time.sleep(0.01), put(*given, **how))[1])
        for number in range(12):
            store.put(make_key(number), make_block(number))
    assert sorted(disk.keys()) == sorted(make_key(number) for number in range(12))


def test_a_late_block_of_a_deleted_document_is_deleted(tmp_path):
    known = {make_key(0), make_key(1)}
    with KVStore(tmp_path, write_behind_bytes=9 * ONE, referenced=lambda keys: known & set(keys)) as store:
        for number in range(2):
            store.put(make_key(number), make_block(number))
        known.remove(make_key(1))  # by another process, which found no file to delete
        store.flush()
        store.refresh()
        assert list(store.keys()) == [make_key(0)]
        known.clear()
        store.put(make_key(2), make_block(2))
    assert list(DiskTier(tmp_path, RawCodec()).keys()) == [make_key(0)], "refresh looks at what was written late alone"


TURNS_READ_ONLY = """
from ragcache.errors import StoreReadOnlyError
from ragcache.store.kv_store import KVStore
with KVStore(disk / "kv", write_behind_bytes=100_000, disk_bytes=100_000) as store:
    store.put(make_key(1), make_block(1))
    store.flush()
    turn_read_only()
    assert store.put(make_key(2), make_block(2)).equal(make_block(2))
    with pytest.raises(StoreReadOnlyError, match=str(disk / "kv")):
        store.flush()
    for number in (1, 2):
        assert store.get(make_key(number)).block.equal(make_block(number))
"""


def test_a_disk_that_turns_read_only(tmp_path):
    run_on_tiny_disk(tmp_path, TURNS_READ_ONLY)
