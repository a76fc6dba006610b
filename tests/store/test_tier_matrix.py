"""Every tier with every policy, and every codec where it encodes: the same bits, never more bytes than the budget."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bases import ready
from blocks import make_block, make_key, make_mixed_block
from covering import covering

from ragcache.codecs import CODECS, Codec, get_codec
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import POLICIES, EvictionPolicy, get_policy
from ragcache.store.tiers import BudgetedTier, DeviceTier, DiskTier, DurableTier, MemoryTier, Tier
from ragcache.store.tiers.write_behind import WriteBehind

Make = Callable[[Path, Codec, int, EvictionPolicy], Tier]
TIERS: dict[str, Make] = {
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
"""The TIERS that encode what they hold."""


@pytest.mark.parametrize(
    ("tier_name", "policy", "codec_name"),
    covering(
        *(TIERS, sorted(POLICIES), sorted(CODECS)),
        together=[(0, 1), (0, 2)],
        where=lambda tier_name, policy, codec_name: tier_name in ENCODING or codec_name == "raw",
    ),
)
def test_the_same_bits_within_the_budget(tier_name: str, policy: str, codec_name: str, tmp_path: Path) -> None:
    rng, root = random.Random(f"{tier_name} {policy} {codec_name}"), tmp_path / "kv"
    codec = ready(get_codec(codec_name), made(0), made(1))
    expected = {number: recoded(codec, number) for number in range(6)}
    budget = 3 * (max(block.num_bytes for block in expected.values()) + 1200)
    tier = TIERS[tier_name](root, codec, budget, get_policy(policy, rng.choice(["all", "tinylfu"])))
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
