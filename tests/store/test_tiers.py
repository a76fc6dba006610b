"""What every tier keeps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from bases import ready
from blocks import DTYPES, make_block, make_key, make_mixed_block
from covering import covering
from flushes import needs_proc, record_calls, unflushed
from remotes import KINDS, remote_url
from shared_tier import SharedTier

from ragcache.codecs import CODECS, Codec, RawCodec, get_codec
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import LRU, POLICIES, EvictionPolicy, get_policy
from ragcache.store.remote import Connection, open_blobs
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


def test_a_block_comes_back_bit_for_bit(tier: Tier) -> None:
    for number, case in enumerate(product((make_block, make_mixed_block), DTYPES, (0, 1, 50))):
        make, dtype, num_tokens = case
        block, key = make(1, num_tokens=num_tokens, dtype=dtype), make_key(number)
        held = tier.put(key, block)
        assert held is not None, case
        assert held.equal(block), case
        got = tier.get(key)
        assert got is not None, case
        assert got.equal(block), case
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


# Every tier with every policy, and every codec where it encodes: the same bits, never more bytes than the budget


Make = Callable[[Path, Codec, int, EvictionPolicy], Tier]
BUDGETED: dict[str, Make] = {
    "device": lambda path, codec, budget, policy: DeviceTier(torch.device("cpu"), budget, policy),
    "memory": lambda path, codec, budget, policy: MemoryTier(budget, policy),
    "disk": lambda path, codec, budget, policy: DiskTier(path, codec, budget, policy),
    "behind": lambda path, codec, budget, policy: WriteBehind(DiskTier(path, codec, budget, policy), 40_000),
}


def held_bytes(tier: Tier, root: Path) -> int:
    """Bytes that can be got or are on disk, without asking the tier for its count."""
    if isinstance(tier, BudgetedTier):
        return sum(block.num_bytes for block in map(tier.get, list(tier.keys())) if block is not None)
    if isinstance(tier, DurableTier):
        tier.flush()
    return sum(path.stat().st_size for path in root.rglob("*") if path.suffix in (".safetensors", ".tmp"))


def made(number: int) -> KVBlock:
    """Every third block is one whose layers differ."""
    return (make_block if number % 3 else make_mixed_block)(number, num_tokens=20 + number % 5)


def recoded(codec: Codec, number: int) -> KVBlock:
    return codec.decode(codec.encode(made(number)))


ENCODING = {"disk", "behind"}
"""The BUDGETED that encode what they hold."""


@pytest.mark.parametrize(
    ("tier_name", "policy", "codec_name"),
    covering(
        *(BUDGETED, sorted(POLICIES), sorted(CODECS)),
        together=[(0, 1), (0, 2)],
        where=lambda tier_name, policy, codec_name: tier_name in ENCODING or codec_name == "raw",
    ),
)
def test_the_same_bits_within_the_budget(tier_name: str, policy: str, codec_name: str, tmp_path: Path) -> None:
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
        assert got is None or got.equal(expected[number])
        if rng.random() < 0.1:
            tier.delete(key)
            assert tier.get(key) is None
        del got
        assert held_bytes(tier, root) <= budget
    tier.close()
    assert served > 3
    if isinstance(tier, DiskTier):
        reopened = DiskTier(root, codec, budget, get_policy(policy))
        for key in list(reopened.keys()):
            block = reopened.get(key)
            assert block is not None
            assert block.equal(expected[next(n for n in range(6) if make_key(n) == key)])
