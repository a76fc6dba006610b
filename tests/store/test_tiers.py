"""What every tier keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from blocks import DTYPES, make_block, make_key, make_mixed_block
from flushes import needs_proc, record_calls, unflushed
from remotes import KINDS, remote_url
from shared_tier import SharedTier

from ragcache.codecs import RawCodec
from ragcache.errors import ConfigError
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import LRU
from ragcache.store.remote import Connection, open_blobs
from ragcache.store.tiers import (
    CachedTier,
    DeviceTier,
    DiskTier,
    DurableTier,
    MemoryTier,
    RemoteTier,
    Tier,
    TierUsage,
)
from ragcache.store.tiers.write_behind import WriteBehind


def open_remote(kind: str, path: Path) -> RemoteTier:
    return RemoteTier(Connection(open_blobs(remote_url(kind, path)), "tests"), RawCodec())


TIERS: dict[str, Callable[[Path], Tier]] = {
    "device": lambda path: DeviceTier(torch.device("cpu"), 1 << 20, LRU()),
    "memory": lambda path: MemoryTier(1 << 20, LRU()),
    "disk": lambda path: DiskTier(path, RawCodec()),
    "disk with a budget": lambda path: DiskTier(path, RawCodec(), 1 << 20),
    "disk written behind": lambda path: WriteBehind(DiskTier(path, RawCodec()), 1 << 20),
    "shared": lambda path: SharedTier(path, RawCodec()),
    **{f"remote {kind}": partial(open_remote, kind) for kind in KINDS},
    "remote cached": lambda path: CachedTier(DiskTier(path, RawCodec()), open_remote("s3", path)),
}


@pytest.fixture(params=sorted(TIERS))
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    tier = TIERS[request.param](tmp_path / "kv")
    assert tier.name == request.param.split()[0]
    yield tier
    tier.close()


def settle(tier: Tier) -> None:
    if isinstance(tier, DurableTier):
        tier.flush()


@pytest.mark.parametrize("make", [make_block, make_mixed_block])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_a_block_comes_back_bit_for_bit(
    tier: Tier, dtype: torch.dtype, num_tokens: int, make: Callable[..., KVBlock]
) -> None:
    block = make(1, num_tokens=num_tokens, dtype=dtype)
    held = tier.put(make_key(1), block)
    assert held is not None
    assert held.equal(block)
    got = tier.get(make_key(1))
    assert got is not None
    assert got.equal(block)
    assert got.dtype == dtype


@pytest.mark.parametrize("budget_bytes", [None, 1 << 20])
@needs_proc
def test_names_of_blocks_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_bytes: int | None) -> None:
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


def test_an_empty_tier_has_nothing(tier: Tier) -> None:
    assert tier.get(make_key(1)) is None
    assert make_key(1) not in tier
    assert list(tier.keys()) == []
    assert tier.usage() == TierUsage(0, 0)
    tier.delete(make_key(1))


def test_keys_and_usage_are_those_of_the_blocks_held(tier: Tier) -> None:
    blocks = {make_key(number): make_block(number) for number in range(20)}
    for key, block in blocks.items():
        tier.put(key, block)
    assert sorted(tier.keys()) == sorted(blocks)
    settle(tier)
    assert sorted(tier.keys()) == sorted(blocks)
    usage = tier.usage()
    assert usage.blocks == 20
    assert usage.num_bytes >= sum(block.num_bytes for block in blocks.values())
    for key in tier.keys():  # noqa: SIM118
        tier.delete(key)
    assert tier.usage() == TierUsage(0, 0)


def test_putting_a_key_again_replaces_its_block(tier: Tier) -> None:
    tier.put(make_key(1), make_block(1))
    settle(tier)
    before = tier.usage()
    tier.put(make_key(1), make_block(2))
    settle(tier)
    assert tier.usage() == before
    got = tier.get(make_key(1))
    assert got is not None
    assert got.equal(make_block(2))


def test_blocks_in_use_outlive_deletion_replacement_and_close(tier: Tier) -> None:
    tier.put(make_key(1), make_block(1))
    held = tier.get(make_key(1))
    tier.put(make_key(1), make_block(2))
    replaced = tier.get(make_key(1))
    tier.delete(make_key(1))
    tier.close()
    assert held is not None
    assert held.equal(make_block(1))
    assert replaced is not None
    assert replaced.equal(make_block(2))


def test_a_block_is_held_by_value(tier: Tier) -> None:
    block = make_block(1)
    tier.put(make_key(1), block)
    block.keys.zero_()
    got = tier.get(make_key(1))
    assert got is not None
    assert got.equal(make_block(1))


def test_slices_of_a_batch_are_held_without_the_batch(tier: Tier) -> None:
    batch = torch.randn(2, 2, 1000, 4)
    part = batch[:, :, 100:105]
    tier.put(make_key(1), KVBlock(part, part))
    got = tier.get(make_key(1))
    assert got is not None
    assert got.equal(KVBlock(part, part))
    assert got.keys.is_contiguous()
    settle(tier)
    assert tier.usage().num_bytes < batch.nbytes


def test_threads_get_whole_blocks_or_none(tier: Tier) -> None:
    """Four threads put, get and delete the same few keys."""
    keys = [make_key(number) for number in range(4)]

    def work(seed: int) -> int:
        wrong = 0
        for step in range(60):
            key = keys[(seed + step) % 4]
            number = keys.index(key)
            if step % 3 == 0:
                tier.put(key, make_block(number))
            elif step % 7 == 0:
                tier.delete(key)
            block = tier.get(key)
            wrong += block is not None and not block.equal(make_block(number))
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [0, 0, 0, 0]


@pytest.mark.parametrize("key", ["", "../../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "é" * 64, "a" * 64 + "\n"])
def test_only_block_keys_become_paths(tmp_path: Path, key: str) -> None:
    tier = DiskTier(tmp_path / "kv", RawCodec())
    for action in (tier.get, tier.delete, tier.verify, tier.__contains__, lambda key: tier.put(key, make_block(0))):
        with pytest.raises(ConfigError, match="no block key"):
            action(key)
    assert list(tmp_path.rglob("*")) == []


def test_disk_is_sharded_and_survives_a_new_tier(tmp_path: Path) -> None:
    key = make_key(1)
    DiskTier(tmp_path, RawCodec()).put(key, make_block(1))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")] == [
        f"{key[:2]}/{key[2:4]}/{key}.safetensors"
    ]
    got = DiskTier(tmp_path, RawCodec()).get(key)
    assert got is not None
    assert got.equal(make_block(1))


def test_disk_lists_nothing_but_blocks(tmp_path: Path) -> None:
    tier, key = DiskTier(tmp_path, RawCodec()), make_key(1)
    tier.put(key, make_block(1))
    (tier.path(key).parent / f".{key}.safetensors.1-01234567.tmp").write_bytes(b"x" * 100)
    (tier.path(key).parent / f"{make_key(2)}.safetensors").write_bytes(b"in the wrong shard")
    (tmp_path / "README").write_text("")
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / "note").write_text("")
    assert list(tier.keys()) == [key]
    assert tier.usage() == TierUsage(1, tier.path(key).stat().st_size)
