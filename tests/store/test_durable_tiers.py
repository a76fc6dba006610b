"""What every durable tier keeps beyond what every tier does, and a store over one that is no directory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from blocks import make_block, make_key, tier_of
from remotes import KINDS, remote_url
from shared_tier import SharedTier

from ragcache.codecs import Int8Codec, RawCodec
from ragcache.errors import ConfigError, MissingBlockError, PinError
from ragcache.kv.block import KVBlock
from ragcache.store import tiers
from ragcache.store.eviction import LRU
from ragcache.store.kv_store import KVStore
from ragcache.store.remote import Connection, open_blobs
from ragcache.store.tiers import CachedTier, DiskTier, DurableTier, RemoteTier
from ragcache.store.tiers.write_behind import WriteBehind

ROOMY = 1 << 20
Open = Callable[[Path], DurableTier]


def open_remote(kind: str, path: Path) -> RemoteTier:
    return RemoteTier(Connection(open_blobs(remote_url(kind, path)), "tests"), Int8Codec())


def cached(kind: str, path: Path, disk_bytes: int | None = None) -> CachedTier:
    """A disk of its own for each instance, as each machine has one."""
    local = path / secrets.token_hex(8)
    return CachedTier(DiskTier(local, Int8Codec(), disk_bytes), open_remote(kind, path))


DURABLE: dict[str, Open] = {
    "disk": lambda path: DiskTier(path, Int8Codec()),
    "disk with a budget": lambda path: DiskTier(path, Int8Codec(), ROOMY),
    "disk written behind": lambda path: WriteBehind(DiskTier(path, Int8Codec()), ROOMY),
    "shared": lambda path: SharedTier(path, Int8Codec()),
    **{kind: partial(open_remote, kind) for kind in KINDS},
    "disk before s3": lambda path: cached("s3", path),
    "disk with a budget before redis": lambda path: cached("redis", path, ROOMY),
    "disk before s3, written behind": lambda path: WriteBehind(cached("s3", path), ROOMY),
    "shared, written behind": lambda path: WriteBehind(SharedTier(path, Int8Codec()), ROOMY),
}
KEY, OTHER = make_key(1), make_key(2)


@pytest.fixture(params=sorted(DURABLE))
def open_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], DurableTier]]:
    """Opens the tier as one process after the other would."""
    opened: list[DurableTier] = []

    def open_one() -> DurableTier:
        opened.append(DURABLE[request.param](tmp_path / "kv"))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def int8(block: KVBlock) -> KVBlock:
    return Int8Codec().decode(Int8Codec().encode(block))


def test_blocks_outlive_the_tier_that_was_given_them(open_tier: Callable[[], DurableTier]) -> None:
    first = open_tier()
    held = {key: first.put(key, make_block(1), flushed=flushed) for key, flushed in ((KEY, False), (OTHER, True))}
    first.close()
    second = open_tier()
    assert sorted(second.keys()) == sorted(held)
    for key, block in held.items():
        assert block.equal(int8(make_block(1)))
        got = second.get(key)
        assert got is not None
        assert got.equal(block)


def test_a_flushed_put_and_flush_leave_nothing_to_wait_for(open_tier: Callable[[], DurableTier]) -> None:
    """Another process sees the block at once, while the first goes on."""
    first, second = open_tier(), open_tier()
    first.put(KEY, make_block(1), flushed=True)
    assert KEY in second
    first.put(OTHER, make_block(2))
    first.flush([OTHER])
    assert OTHER in second
    first.flush()
    assert first.unwritten_bytes == 0


def test_a_tier_that_writes_late_says_so(open_tier: Callable[[], DurableTier]) -> None:
    first, second = open_tier(), open_tier()
    first.put(KEY, make_block(1))
    assert first.writes_late or KEY in second


def test_a_roundtrip_is_what_put_returns_and_keeps_nothing(open_tier: Callable[[], DurableTier]) -> None:
    tier = open_tier()
    back = tier.roundtrip(KEY, make_block(1))
    assert KEY not in tier
    assert not back.equal(make_block(1)), "the codec is lossy, or this shows nothing"
    held = tier.put(KEY, make_block(1))
    assert held is not None
    assert back.equal(held)


def test_an_encoded_block_keeps_its_bits(open_tier: Callable[[], DurableTier]) -> None:
    """Encoding it again would lose more of it, or bring it into another codec."""
    first = open_tier()
    held, plain = first.roundtrip(KEY, make_block(1)), make_block(2)
    first.put(KEY, held, encoded=True)
    first.put(OTHER, plain, encoded=True)
    first.close()
    second = open_tier()
    for key, expected in ((KEY, held), (OTHER, plain)):
        got = second.get(key)
        assert got is not None
        assert got.equal(expected)


def test_verify_finds_what_is_kept_and_misses_what_is_not(open_tier: Callable[[], DurableTier]) -> None:
    tier = open_tier()
    with pytest.raises(MissingBlockError):
        tier.verify(KEY)
    tier.put(KEY, make_block(1))
    tier.verify(KEY)
    tier.delete(KEY)
    with pytest.raises(MissingBlockError):
        tier.verify(KEY)


def test_marks_of_use_are_seen_by_all(open_tier: Callable[[], DurableTier]) -> None:
    first, second = open_tier(), open_tier()
    assert first.used_at(KEY) is None
    first.mark_used(KEY, 1_000.0)
    assert first.used_at(KEY) is None, "there is no block to mark"
    first.put(KEY, make_block(1), flushed=True)
    first.mark_used(KEY, 1_234_567.0)
    assert second.used_at(KEY) == pytest.approx(1_234_567.0)
    first.delete(KEY)
    assert second.used_at(KEY) is None


def test_a_sweep_leaves_whole_blocks(open_tier: Callable[[], DurableTier]) -> None:
    tier = open_tier()
    assert tier.sweep(0.0) == 0
    tier.put(KEY, make_block(1), flushed=True)
    assert tier.sweep(0.0) == 0
    tier.verify(KEY)


def test_only_one_with_a_budget_has_been_bounded(open_tier: Callable[[], DurableTier]) -> None:
    tier = open_tier()
    assert tier.has_been_bounded == (tier.budget_bytes is not None)
    assert tier.evictions == 0


def test_every_process_sees_that_blocks_were_bounded(tmp_path: Path) -> None:
    DiskTier(tmp_path, RawCodec(), ROOMY).put(KEY, make_block(1))
    later = DiskTier(tmp_path, RawCodec())
    assert later.budget_bytes is None
    assert later.has_been_bounded
    assert WriteBehind(later, ROOMY).has_been_bounded


def test_only_block_keys_are_taken_and_become_paths(open_tier: Callable[[], DurableTier], tmp_path: Path) -> None:
    tier = open_tier()
    for key in ("", "../../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "é" * 64, "a" * 64 + "\n"):
        for action in (tier.get, tier.delete, tier.verify, tier.size, tier.used_at, tier.__contains__):
            with pytest.raises(ConfigError, match="no block key"):
                action(key)
        for write in (tier.put, partial(tier.put, flushed=True), partial(tier.put, encoded=True), tier.roundtrip):
            with pytest.raises(ConfigError, match="no block key"):
                write(key, make_block(1))
    assert list(tier.keys()) == []
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.fixture(params=[0, ROOMY])
def shared(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., KVStore]:
    """Opens stores over the shared tier, which is one line in the dict; with and without write-behind."""
    monkeypatch.setitem(tiers.DURABLE, "shared", SharedTier)
    bound: int = request.param
    return lambda **options: KVStore(tmp_path, durable="shared", write_behind_bytes=bound, **options)


def test_a_store_over_another_durable_tier(shared: Callable[..., KVStore], tmp_path: Path) -> None:
    with shared(codec="int8") as store:
        assert tier_of(store, KEY) is None
        assert not store.gives_up
        held = store.put(KEY, make_block(1))
        assert held.equal(int8(make_block(1)))
        store.put(OTHER, make_block(2), "flushed")
        store.flush()
        assert store.sweep() == 0
    with shared() as other:
        loaded = other.get(KEY)
        assert loaded is not None
        assert loaded.tier == "shared"
        assert loaded.block.equal(held)
        assert other.stats().hits_by_tier == {"memory": 0, "shared": 1}
        assert tier_of(other, KEY) == "memory"
        other.delete(KEY)
        assert other.get(KEY) is None
        assert sorted(other.keys()) == [OTHER]
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_what_another_process_deletes_goes_from_memory(shared: Callable[..., KVStore]) -> None:
    with shared() as store, shared() as other:
        store.put(KEY, make_block(1), "flushed")
        other.delete(KEY)
        assert store.refresh() == 1
        assert KEY not in store


def test_time_to_live_and_pins_need_no_files(shared: Callable[..., KVStore]) -> None:
    with shared(ttl_s=60.0) as store:
        for key in (KEY, OTHER):
            store.put(key, make_block(1), "flushed")
        store.pin([OTHER])
    SharedTier.services[store.root].update(
        {key: kept._replace(used_at=1_000.0) for key, kept in SharedTier.services[store.root].items()}
    )
    with shared(ttl_s=60.0) as store:
        assert store.expire() == [KEY]
        assert list(store.keys()) == [OTHER]


def test_a_full_tier_is_named(shared: Callable[..., KVStore], monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_block(1).num_bytes
    monkeypatch.setattr(SharedTier, "budget_bytes", one + one // 2)
    with shared() as store:
        store.put(KEY, make_block(1), "flushed")
        with pytest.raises(PinError, match=r"1 pinned blocks .* would fill the shared tier"):
            store.pin([KEY])


def test_every_tier_is_told_of_the_device(shared: Callable[..., KVStore], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[torch.device] = []
    monkeypatch.setattr(SharedTier, "on_device", lambda tier, device: told.append(device), raising=False)
    with shared(device_bytes=ROOMY) as store:
        for _ in range(2):
            store.use_device(torch.device("cpu"))
        assert [tier.name for tier in store._tiers] == ["device", "memory", "shared"]
        assert list(store.stats().bytes_by_tier) == ["device", "memory", "shared"]
    assert told == [torch.device("cpu")] * 2


def test_host_memory_is_page_locked_for_a_cuda_device_alone() -> None:
    memory = tiers.MemoryTier(ROOMY, LRU())
    for device, expected in (("cpu", False), ("cuda", True), ("cpu", True)):
        memory.on_device(torch.device(device))
        assert memory.page_locked == expected, device
