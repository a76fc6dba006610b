"""Blocks on their way down. What a tier evicts goes to the next one; nothing that was deleted, or never was to be
written, comes back."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from bases import keep_basis
from blocks import make_block, make_key, put_all, served_from, tier_of

from ragcache.codecs import CODECS, RawCodec
from ragcache.errors import MissingBlockError, PinError, StoreFullError, StoreReadOnlyError
from ragcache.store.kv_store import KVStore
from ragcache.store.tiers import DiskTier
from ragcache.store.tiers import device as device_tier

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
        put_all(store, range(4))
        assert where(store, 4) == ["disk", "disk", "memory", "device"]
        assert sorted(store.stats().bytes_by_tier) == ["device", "disk", "memory"]
        assert served_from(store, make_key(0), make_block(0)) == "disk"
        assert tier_of(store, make_key(0)) == "device"
        assert tier_of(store, make_key(3)) == "memory", "it made room on the device"


def test_the_device_hands_down_what_memory_does_not_have(tmp_path):
    with open_store(tmp_path, device_bytes=2 * ONE, memory_bytes=2 * ONE) as store:
        put_all(store, range(3))
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
        assert make_key(0) in store
        store.put(make_key(1), make_block(1))
        assert where(store, 2) == [None, "memory"]
        assert make_key(0) not in store
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
        put_all(store, range(3))
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
        put_all(store, range(1, 6))
        assert tier_of(store, make_key(0)) == "device"
        assert store.stats().pinned == 1
        with pytest.raises(PinError, match="would fill the device tier"):
            store.pin([make_key(1)])
        with pytest.raises(MissingBlockError, match=make_key(9)):
            store.pin([make_key(9)])
        assert store.pinned == {make_key(0)}
    with KVStore(tmp_path, disk_bytes=4000) as store:
        put_all(store, range(6, 20))
        assert tier_of(store, make_key(0)) == "disk"
        store.unpin([make_key(0), make_key(8)])
        put_all(store, range(20, 26))
        assert tier_of(store, make_key(0)) is None
    with KVStore(tmp_path, read_only=True) as reader, pytest.raises(StoreReadOnlyError):
        reader.pin([make_key(25)])


@pytest.mark.parametrize("missing", [0, 1])
def test_beside_pinned_blocks_there_is_room_for_one_more(tmp_path, missing):
    with KVStore(tmp_path, memory_bytes=3 * ONE - missing) as store:
        put_all(store, range(2))
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
        put_all(store, range(3))
        store._durable.delete(make_key(2))

        def full(key: str, block: object, **how: bool) -> None:
            raise StoreFullError("no space")

        monkeypatch.setattr(store._durable, "put", full)
        for number in (0, 1, 0, 1):
            assert served_from(store, make_key(number), make_block(number)) is not None
        assert caplog.text.count("StoreFullError") == 1


def test_a_block_that_is_handed_down_after_its_document_was_deleted_is_deleted(tmp_path):
    known = {make_key(number) for number in range(3)}
    with KVStore(tmp_path, memory_bytes=ONE, referenced=lambda keys: known & set(keys)) as store:
        for number in range(3):
            store.put(make_key(number), make_block(number))
            store._durable.delete(make_key(number))  # as the budget may
        assert sorted(store.keys()) == sorted([make_key(0), make_key(1)])
        known.remove(make_key(1))  # by another process, before it was handed down
        store.refresh()
        assert list(store.keys()) == [make_key(0)]
        store.put(make_key(3), make_block(3))
        assert make_key(2) in store._durable
        known.clear()
    left = list(DiskTier(tmp_path, RawCodec()).keys())
    assert sorted(left) == sorted([make_key(0), make_key(3)]), "looked at once after it was handed down, and at the end"
