"""What every tier keeps, what every durable one keeps beyond it, and a store over one that is no directory."""

import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from bases import ready
from blocks import DTYPES, make_block, make_key, make_mixed_block, same, served_from, tier_of
from covering import covering
from flushes import needs_proc, record_calls, unflushed

from integrations.remote.tests.remotes import KINDS, remote_url
from ragcache.codecs import CODECS, Codec, Int8Codec, RawCodec, get_codec
from ragcache.errors import ConfigError, MissingBlockError, PinError
from ragcache.kv.block import KVBlock
from ragcache.store import kv_store, tiers
from ragcache.store.eviction import LRU, POLICIES, EvictionPolicy, get_policy
from ragcache.store.kv_store import KVStore
from ragcache.store.remote import open_blobs
from ragcache.store.remote.connection import Connection
from ragcache.store.tiers import (
    BudgetedTier,
    CachedTier,
    DeviceTier,
    DiskTier,
    DurableTier,
    MemoryTier,
    RemoteTier,
    Tier,
    TierUsage,
)

ROOMY = 1 << 20


def durable(codec: Codec) -> dict[str, Callable[[Path], DurableTier]]:
    """Durable tiers by a name that begins with the tier's own."""

    def remote(kind: str, path: Path) -> RemoteTier:
        return RemoteTier(Connection(open_blobs(remote_url(kind, path)), "tests"), codec)

    def cached(kind: str, path: Path, disk_bytes: int | None = None) -> CachedTier:
        """A disk of its own for each instance, as each machine has one."""
        return CachedTier(DiskTier(path / secrets.token_hex(8), codec, disk_bytes), remote(kind, path))

    return {
        "disk": lambda path: DiskTier(path, codec),
        "disk with a budget": lambda path: DiskTier(path, codec, ROOMY),
        **{f"remote {kind}": partial(remote, kind) for kind in KINDS},
        "remote cached": partial(cached, "s3"),
        "remote cached within a budget": lambda path: cached("redis", path, ROOMY),
    }


TIERS: dict[str, Callable[[Path], Tier]] = {
    "device": lambda path: DeviceTier(torch.device("cpu"), ROOMY, LRU()),
    "memory": lambda path: MemoryTier(ROOMY, LRU()),
    **{name: make for name, make in durable(RawCodec()).items() if "cached " not in name},
}


@pytest.fixture(params=sorted(TIERS))
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    tier = TIERS[request.param](tmp_path / "kv")
    assert tier.name == request.param.split()[0]
    yield tier
    tier.close()


def test_a_block_comes_back_bit_for_bit(tier):
    for number, case in enumerate(product((make_block, make_mixed_block), DTYPES, (0, 1, 50))):
        make, dtype, num_tokens = case
        block, key = make(1, num_tokens=num_tokens, dtype=dtype), make_key(number)
        assert same(tier.put(key, block), block), case
        got = tier.get(key)
        assert same(got, block), case
        assert got.dtype == dtype


@pytest.mark.parametrize("budget_bytes", [None, 1 << 20])
@needs_proc
def test_names_of_blocks_are_flushed(tmp_path, monkeypatch, budget_bytes):
    """What is put, replaced or deleted is so after a power cut, too."""
    tier, calls = DiskTier(tmp_path / "new" / "kv", RawCodec(), budget_bytes), record_calls(monkeypatch)
    for step in (
        lambda: tier.put(make_key(1), make_block(1)),
        lambda: tier.put(make_key(1), make_block(1)),
        lambda: tier.delete(make_key(1)),
    ):
        calls.clear()
        step()
        assert any(path.name.startswith(make_key(1)) for what, path in calls if what in ("rename", "remove"))
        assert unflushed(calls) == []


def test_keys_and_usage_are_those_of_the_blocks_held(tier):
    blocks = {make_key(number): make_block(number) for number in range(20)}
    for key, block in blocks.items():
        tier.put(key, block)
    assert sorted(tier.keys()) == sorted(blocks)
    assert sorted(tier.keys()) == sorted(blocks)
    usage = tier.usage()
    assert usage.blocks == 20
    assert usage.num_bytes >= sum(block.num_bytes for block in blocks.values())
    for key in tier.keys():  # noqa: SIM118
        tier.delete(key)
    assert tier.usage() == TierUsage(0, 0)


def test_putting_a_key_again_replaces_its_block(tier):
    tier.put(make_key(1), make_block(1))
    before = tier.usage()
    tier.put(make_key(1), make_block(2))
    assert tier.usage() == before
    assert same(tier.get(make_key(1)), make_block(2))


def test_blocks_in_use_outlive_deletion_replacement_and_close(tier):
    tier.put(make_key(1), make_block(1))
    held = tier.get(make_key(1))
    tier.put(make_key(1), make_block(2))
    replaced = tier.get(make_key(1))
    tier.delete(make_key(1))
    tier.close()
    assert same(held, make_block(1))
    assert same(replaced, make_block(2))


def test_a_block_is_held_by_value(tier):
    block = make_block(1)
    tier.put(make_key(1), block)
    block.keys.zero_()
    assert same(tier.get(make_key(1)), make_block(1))


def test_slices_of_a_batch_are_held_without_the_batch(tier):
    batch = torch.randn(2, 2, 1000, 4)
    part = batch[:, :, 100:105]
    tier.put(make_key(1), KVBlock(part, part))
    got = tier.get(make_key(1))
    assert same(got, KVBlock(part, part))
    assert got.keys.is_contiguous()
    assert tier.usage().num_bytes < batch.nbytes


def test_threads_get_whole_blocks_or_none(tier):
    """Four threads put, get and delete the same few keys."""
    keys = [make_key(number) for number in range(4)]

    def work(seed: int) -> int:
        wrong = 0
        for step in range(30):
            key = keys[(seed + step) % 4]
            number = keys.index(key)
            if step % 3 == 0:
                tier.put(key, make_block(number))
            elif step % 7 == 0:
                tier.delete(key)
            block = tier.get(key)
            wrong += block is not None and not same(block, make_block(number))
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [0, 0, 0, 0]


def test_disk_lists_nothing_but_blocks(tmp_path):
    tier, key = DiskTier(tmp_path, RawCodec()), make_key(1)
    tier.put(key, make_block(1))
    (tier.path(key).parent / f".{key}.safetensors.1-01234567.tmp").write_bytes(b"x" * 100)
    (tier.path(key).parent / f"{make_key(2)}.safetensors").write_bytes(b"in the wrong shard")
    (tmp_path / "README").write_text("")
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / "note").write_text("")
    assert list(tier.keys()) == [key]
    assert tier.usage() == TierUsage(1, tier.path(key).stat().st_size)


# Every tier with every policy, and every codec where it encodes: the same bits, never more bytes than the budget


Make = Callable[[Path, Codec, int, EvictionPolicy], Tier]
BUDGETED: dict[str, Make] = {
    "device": lambda path, codec, budget, policy: DeviceTier(torch.device("cpu"), budget, policy),
    "memory": lambda path, codec, budget, policy: MemoryTier(budget, policy),
    "disk": lambda path, codec, budget, policy: DiskTier(path, codec, budget, policy),
}


def held_bytes(tier: Tier, root: Path) -> int:
    """Bytes that can be got or are on disk, without asking the tier for its count."""
    if isinstance(tier, BudgetedTier):
        return sum(block.num_bytes for block in map(tier.get, list(tier.keys())) if block is not None)
    return sum(path.stat().st_size for path in root.rglob("*") if path.suffix in (".safetensors", ".tmp"))


def made(number: int) -> KVBlock:
    """Every third block is one whose layers differ."""
    return (make_block if number % 3 else make_mixed_block)(number, num_tokens=20 + number % 5)


def recoded(codec: Codec, number: int) -> KVBlock:
    return codec.decode(codec.encode(made(number)))


@pytest.mark.parametrize(
    ("tier_name", "policy", "codec_name"),
    covering(
        *(BUDGETED, sorted(POLICIES), sorted(CODECS)),
        together=[(0, 1), (0, 2)],
        where=lambda tier_name, policy, codec_name: tier_name == "disk" or codec_name == "raw",
    ),
)
def test_the_same_bits_within_the_budget(tier_name, policy, codec_name, tmp_path):
    rng, root = random.Random(f"{tier_name} {policy} {codec_name}"), tmp_path / "kv"
    codec = ready(get_codec(codec_name), made(0), made(1))
    expected = {number: recoded(codec, number) for number in range(6)}
    budget = 3 * (max(block.num_bytes for block in expected.values()) + 1200)
    tier = BUDGETED[tier_name](root, codec, budget, get_policy(policy, rng.choice(["all", "tinylfu"])))
    served = 0
    for _ in range(30):
        number = rng.randrange(6)
        key = make_key(number)
        got = tier.get(key)
        if got is None:
            given = expected[number] if isinstance(tier, BudgetedTier) else made(number)
            got = tier.put(key, given)
        else:
            served += 1
        assert got is None or same(got, expected[number])
        if rng.random() < 0.1:
            tier.delete(key)
            assert tier.get(key) is None
        del got
        assert held_bytes(tier, root) <= budget
    tier.close()
    assert served > 3
    if isinstance(tier, DiskTier):
        reopened = DiskTier(root, codec, budget, get_policy(policy))
        by_key = {make_key(number): block for number, block in expected.items()}
        assert all(same(reopened.get(key), by_key[key]) for key in list(reopened.keys()))


# Every durable tier


DURABLE = durable(Int8Codec())
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


def test_a_roundtrip_is_what_put_returns_and_keeps_nothing(open_tier):
    tier = open_tier()
    back = tier.roundtrip(KEY, make_block(1))
    assert KEY not in tier
    assert not same(back, make_block(1)), "the codec is lossy, or this shows nothing"
    assert same(tier.put(KEY, make_block(1)), back)


def test_an_encoded_block_keeps_its_bits(open_tier):
    """Encoding it again would lose more of it, or bring it into another codec."""
    first = open_tier()
    held, plain = first.roundtrip(KEY, make_block(1)), make_block(2)
    first.put(KEY, held, encoded=True)
    first.put(OTHER, plain, encoded=True)
    first.close()
    second = open_tier()
    assert sorted(second.keys()) == sorted([KEY, OTHER])
    assert same(second.get(KEY), held)
    assert same(second.get(OTHER), plain)


def test_verify_finds_what_is_kept_and_no_sweep_takes_it(open_tier):
    tier = open_tier()
    assert tier.sweep(0.0) == 0
    with pytest.raises(MissingBlockError):
        tier.verify(KEY)
    tier.put(KEY, make_block(1))
    tier.verify(KEY)
    assert tier.sweep(0.0) == 0
    tier.verify(KEY)
    tier.delete(KEY)
    with pytest.raises(MissingBlockError):
        tier.verify(KEY)


def test_marks_of_use_are_seen_by_all(open_tier):
    first, second = open_tier(), open_tier()
    assert first.used_at(KEY) is None
    first.mark_used(KEY, 1_000.0)
    assert first.used_at(KEY) is None, "there is no block to mark"
    first.put(KEY, make_block(1))
    first.mark_used(KEY, 1_234_567.0)
    assert second.used_at(KEY) == pytest.approx(1_234_567.0)
    first.delete(KEY)
    assert second.used_at(KEY) is None


def test_only_one_with_a_budget_has_been_bounded(open_tier):
    tier = open_tier()
    assert tier.has_been_bounded == (tier.budget_bytes is not None)
    assert tier.evictions == 0


def test_every_process_sees_that_blocks_were_bounded(tmp_path):
    DiskTier(tmp_path, RawCodec(), ROOMY).put(KEY, make_block(1))
    later = DiskTier(tmp_path, RawCodec())
    assert later.budget_bytes is None
    assert later.has_been_bounded


def test_only_block_keys_are_taken_and_become_paths(open_tier, tmp_path):
    tier = open_tier()
    for key in ("", "../../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "é" * 64, "a" * 64 + "\n"):
        for action in (tier.get, tier.delete, tier.verify, tier.size, tier.used_at, tier.__contains__):
            with pytest.raises(ConfigError, match="no block key"):
                action(key)
        for write in (tier.put, partial(tier.put, encoded=True), tier.roundtrip):
            with pytest.raises(ConfigError, match="no block key"):
                write(key, make_block(1))
    assert list(tier.keys()) == []
    assert not list(tmp_path.rglob("*.safetensors"))


def no_directory(root: Path, codec: Codec, *_: object) -> RemoteTier:
    return RemoteTier(Connection(open_blobs(remote_url("folder", root)), "tests"), codec)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., KVStore]:
    """Opens stores over a durable tier that is no directory of blocks."""
    monkeypatch.setattr(kv_store, "DiskTier", no_directory)
    return partial(KVStore, tmp_path / "kv")


def test_a_store_over_another_durable_tier(shared, tmp_path):
    with shared(codec="int8") as store:
        assert tier_of(store, KEY) is None
        assert not store.gives_up
        held = store.put(KEY, make_block(1))
        assert same(held, int8(make_block(1)))
        store.put(OTHER, make_block(2))
        assert store.sweep() == 0
    with shared() as other:
        assert served_from(other, KEY, held) == "remote"
        assert other.stats().hits_by_tier == {"memory": 0, "remote": 1}
        assert tier_of(other, KEY) == "memory"
        other.delete(KEY)
        assert other.get(KEY) is None
        assert sorted(other.keys()) == [OTHER]
    assert list((tmp_path / "kv").rglob("*.safetensors")) == []


def test_what_another_process_deletes_goes_from_memory(shared):
    with shared() as store, shared() as other:
        store.put(KEY, make_block(1))
        other.delete(KEY)
        assert store.refresh() == 1
        assert KEY not in store


def test_time_to_live_and_pins_need_no_files(shared):
    with shared(ttl_s=60.0) as store:
        for key in (KEY, OTHER):
            store.put(key, make_block(1))
        store.pin([OTHER])
    tier = no_directory(store.root, RawCodec())
    for key in (KEY, OTHER):
        tier.mark_used(key, 1_000.0)
    tier.close()
    with shared(ttl_s=60.0) as store:
        assert store.expire() == [KEY]
        assert list(store.keys()) == [OTHER]


def test_a_full_tier_is_named(shared, monkeypatch):
    one = make_block(1).num_bytes
    monkeypatch.setattr(RemoteTier, "budget_bytes", one + one // 2)
    with shared() as store:
        store.put(KEY, make_block(1))
        with pytest.raises(PinError, match=r"1 pinned blocks .* would fill the remote tier"):
            store.pin([KEY])


def test_every_tier_is_told_of_the_device_and_of_the_end(shared, monkeypatch):
    told: list[object] = []
    monkeypatch.setattr(RemoteTier, "on_device", lambda tier, device: told.append(device), raising=False)
    close = RemoteTier.close
    monkeypatch.setattr(RemoteTier, "close", lambda tier: told.append("closed") or close(tier))
    with shared(device_bytes=ROOMY) as store:
        for _ in range(2):
            store.use_device(torch.device("cpu"))
        assert [tier.name for tier in store._tiers] == ["device", "memory", "remote"]
        assert list(store.stats().bytes_by_tier) == ["device", "memory", "remote"]
    assert told == [*[torch.device("cpu")] * 2, "closed"]


def test_host_memory_is_page_locked_for_a_cuda_device_alone():
    memory = tiers.MemoryTier(ROOMY, LRU())
    for device, expected in (("cpu", False), ("cuda", True), ("cpu", True)):
        memory.on_device(torch.device(device))
        assert memory.page_locked == expected, device
