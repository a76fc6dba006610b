"""Blocks on their way down. What a tier evicts goes to the next one; nothing that was deleted, or never was to be
written, comes back. What a thread writes is bounded, visible at once, and on disk when `flush` says so."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import forked
import pytest
import torch
from bases import keep_basis
from blocks import make_block, make_key, same, served_from, tier_of
from tiny_disk import run_on_tiny_disk

from ragcache.codecs import CODECS, RawCodec
from ragcache.errors import MissingBlockError, PinError, StoreFullError, StoreReadOnlyError
from ragcache.kv.block import KVBlock
from ragcache.store.kv_store import KVStore
from ragcache.store.tiers import DiskTier
from ragcache.store.tiers import memory as device_tier
from ragcache.store.tiers.write_behind import WriteBehind

ONE = make_block(0).num_bytes
CPU = torch.device("cpu")


def where(store: KVStore, count: int = 6) -> list[str | None]:
    return [tier_of(store, make_key(number)) for number in range(count)]


def open_store(root: Path, **options: object) -> KVStore:
    store = KVStore(root, **options)  # type: ignore[arg-type]
    store.use_device(CPU)
    return store


def test_promotion_on_use_and_demotion_on_eviction(tmp_path):
    with open_store(tmp_path, device_bytes=ONE, memory_bytes=2 * ONE) as store:
        for number in range(4):
            store.put(make_key(number), make_block(number))
        assert where(store, 4) == ["disk", "disk", "memory", "device"]
        assert sorted(store.stats().bytes_by_tier) == ["device", "disk", "memory"]
        assert served_from(store, make_key(0), make_block(0)) == "disk"
        assert tier_of(store, make_key(0)) == "device"
        assert tier_of(store, make_key(3)) == "memory", "it made room on the device"


def test_the_device_hands_down_what_memory_does_not_have(tmp_path):
    with open_store(tmp_path, device_bytes=2 * ONE, memory_bytes=2 * ONE) as store:
        for number in range(3):
            store.put(make_key(number), make_block(number))
        assert where(store, 3) == ["memory", "device", "device"], "memory had given up the first, the device did later"
        assert sorted(store._tiers.volatile[1].keys()) == sorted([make_key(0), make_key(2)])


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_what_the_disk_gave_up_comes_back_from_memory_bit_for_bit(tmp_path, codec):
    bases = [keep_basis(tmp_path / name, codec, make_block(0, num_tokens=40)) for name in ("size", "kv")]
    with KVStore(tmp_path / "size", codec=codec, basis=bases[0]) as other:
        before = other.stats().bytes_by_tier["disk"]
        other.put(make_key(0), make_block(0, num_tokens=40))
        one = other.stats().bytes_by_tier
    disk_bytes = before + 2 * (one["disk"] - before) + 256  # coded blocks differ a little
    memory_bytes = 2 * one["memory"] + 256
    with open_store(
        tmp_path / "kv", codec=codec, basis=bases[1], memory_bytes=memory_bytes, disk_bytes=disk_bytes
    ) as store:
        first = {number: store.put(make_key(number), make_block(number, num_tokens=40)) for number in range(2)}
        expected = {number: (block.keys.clone(), block.values.clone()) for number, block in first.items()}
        del first
        store._durable.delete(make_key(0))  # as its budget may
        assert tier_of(store, make_key(0)) == "memory"
        store._durable.delete(make_key(1))
        for number in (2, 3):
            store.put(make_key(number), make_block(number, num_tokens=40))
        for number in range(2):
            loaded = store.get(make_key(number))
            if loaded is not None:
                assert torch.equal(loaded.block.keys, expected[number][0])
                assert torch.equal(loaded.block.values, expected[number][1])
        assert tier_of(store, make_key(1)) is not None, "memory handed it down"


def test_a_lossy_block_of_another_codec_is_written_as_it_was_held(tmp_path):
    with KVStore(tmp_path, codec="int4") as store:
        held = store.put(make_key(0), make_block(0, num_tokens=40))
        bits = held.keys.clone()
    with KVStore(tmp_path, codec="raw", memory_bytes=40 * ONE) as store:
        assert store.get(make_key(0)) is not None
        store._durable.delete(make_key(0))
        memory = store._tiers.volatile[0]
        memory._ledger.budget_bytes = 0
        assert memory.put(make_key(1), make_block(1)) is None
        memory._ledger.budget_bytes = make_block(1, num_tokens=40).num_bytes
        store.put(make_key(1), make_block(1, num_tokens=40))
        loaded = store.get(make_key(0))
        assert loaded.tier == "disk"
        assert torch.equal(loaded.block.keys, bits)


def test_what_was_only_remembered_is_never_written(tmp_path):
    with KVStore(tmp_path, memory_bytes=ONE) as store:
        store.put(make_key(0), make_block(0), "memory")
        store.put(make_key(1), make_block(1))
        assert where(store, 2) == [None, "memory"]
        assert list(store.keys()) == [make_key(1)]


def test_a_block_deleted_while_it_is_handed_down_does_not_come_back(tmp_path, monkeypatch):
    with open_store(tmp_path, device_bytes=ONE, memory_bytes=4 * ONE) as store:
        store.put(make_key(0), make_block(0))
        device, memory = store._tiers.volatile
        memory.delete(make_key(0))
        reached, go = threading.Event(), threading.Event()
        hand_down = device.demote

        def slowly(key: str, block: object) -> None:
            reached.set()
            go.wait(10)
            hand_down(key, block)  # type: ignore[arg-type]

        monkeypatch.setattr(device, "demote", slowly)
        with ThreadPoolExecutor(1) as threads:
            putting = threads.submit(store.put, make_key(1), make_block(1))
            assert reached.wait(10)
            store.delete(make_key(0))
            go.set()
            putting.result(10)
        assert where(store, 2) == [None, "device"]


def test_a_block_that_somebody_works_on_is_not_handed_down(tmp_path):
    with KVStore(tmp_path, memory_bytes=ONE) as store:
        store.put(make_key(0), make_block(0))
        store._durable.delete(make_key(0))
        with store._key_locks.hold(make_key(0)):
            store.put(make_key(1), make_block(1))
        assert where(store, 2) == [None, "memory"]


def test_a_block_of_a_document_that_another_process_deleted_is_not_written(tmp_path):
    known: set[str] = {make_key(0), make_key(1)}

    def referenced(keys: Iterable[str]) -> set[str]:
        return known & set(keys)

    with KVStore(tmp_path, memory_bytes=ONE, referenced=referenced) as store:
        store.put(make_key(0), make_block(0))
        with KVStore(tmp_path) as other:
            other.delete(make_key(0))
        known.remove(make_key(0))
        store.put(make_key(1), make_block(1))
        assert where(store, 2) == [None, "memory"]
        store._durable.delete(make_key(1))  # as the budget may
        assert store.refresh() == 0, "a chunk refers to it"
        known.clear()
        assert store.refresh() == 1


def test_a_device_without_memory_left_costs_no_block(tmp_path, monkeypatch, caplog):
    made, full = device_tier.DeviceTier._made, True

    def fail(tier: device_tier.DeviceTier, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        if full:
            raise torch.OutOfMemoryError("no memory")
        return made(tier, make)

    monkeypatch.setattr(device_tier.DeviceTier, "_made", fail)
    with open_store(tmp_path, device_bytes=100 * ONE) as store:
        for number in range(3):
            store.put(make_key(number), make_block(number))
        assert where(store, 3) == ["memory"] * 3
        assert caplog.text.count("has no memory left") == 1
        assert store.stats().bytes_by_tier["device"] == 0
        full = False
        for _ in range(device_tier.RETRY_AFTER):
            assert store.get(make_key(0)) is not None
        assert store.get(make_key(1)) is not None
        assert tier_of(store, make_key(1)) == "device", "tried again"


def test_pinned_blocks_stay_and_outlive_the_process(tmp_path):
    with open_store(tmp_path, device_bytes=2 * ONE, memory_bytes=3 * ONE) as store:
        store.put(make_key(0), make_block(0))
        store.pin([make_key(0)])
        for number in range(1, 6):
            store.put(make_key(number), make_block(number))
        assert tier_of(store, make_key(0)) == "device"
        assert store.stats().pinned == 1
        with pytest.raises(PinError, match="would fill the device tier"):
            store.pin([make_key(1)])
        with pytest.raises(MissingBlockError, match=make_key(9)):
            store.pin([make_key(9)])
        assert store.pinned == {make_key(0)}
    with KVStore(tmp_path, disk_bytes=4000) as store:
        for number in range(6, 20):
            store.put(make_key(number), make_block(number))
        assert tier_of(store, make_key(0)) == "disk"
        store.unpin([make_key(0), make_key(8)])
        for number in range(20, 26):
            store.put(make_key(number), make_block(number))
        assert tier_of(store, make_key(0)) is None
    with KVStore(tmp_path, read_only=True) as reader, pytest.raises(StoreReadOnlyError):
        reader.pin([make_key(25)])


@pytest.mark.parametrize("missing", [0, 1])
def test_beside_pinned_blocks_there_is_room_for_one_more(tmp_path, missing):
    with KVStore(tmp_path, memory_bytes=3 * ONE - missing) as store:
        for number in range(2):
            store.put(make_key(number), make_block(number))
        with pytest.raises(PinError, match="memory tier") if missing else nullcontext():
            store.pin([make_key(0), make_key(1)])
        assert len(store.pinned) == (0 if missing else 2)


def test_deleting_a_pinned_block_ends_the_pin(tmp_path):
    with KVStore(tmp_path) as store:
        store.put(make_key(0), make_block(0))
        store.pin([make_key(0)])
        store.delete(make_key(0))
        assert store.pinned == frozenset()
        (tmp_path / ".pins.json").write_text("not JSON")
        store.refresh()
        assert store.pinned == frozenset()


def test_a_disk_that_fails_while_memory_hands_down_costs_no_question(tmp_path, monkeypatch, caplog):
    with KVStore(tmp_path, memory_bytes=ONE) as store:
        for number in range(3):
            store.put(make_key(number), make_block(number))
        store._durable.delete(make_key(2))

        def full(key: str, block: object, **how: bool) -> None:
            raise StoreFullError("no space")

        monkeypatch.setattr(store._durable, "put", full)
        for number in (0, 1, 0, 1):
            assert served_from(store, make_key(number), make_block(number)) is not None
        assert caplog.text.count("StoreFullError") == 1


# Written behind


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
