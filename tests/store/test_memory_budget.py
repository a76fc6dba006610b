"""The memory tier's budget is never exceeded, and room is made only where that helps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blocks import make_block, make_key
from covering import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch import Tensor

from ragcache.store.eviction import LRU, Entry
from ragcache.store.tiers import BudgetedTier, DeviceTier, MemoryTier, TierUsage, memory

BYTES_PER_TOKEN = make_block(0, num_tokens=1).num_bytes


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBytes]:
    live = LiveBytes()
    monkeypatch.setattr(memory, "private_copy", live.copy)
    yield live
    gc.collect()


def churn(tier: MemoryTier, seed: int, steps: int) -> int:
    """Put and delete blocks of 0 to 11 tokens; returns how often the tier said that it holds more than its budget."""
    over = 0
    for step in range(steps):
        number = (seed * 31 + step * 7) % 23
        tier.put(make_key(number), make_block(number, num_tokens=number % 12))
        if step % 5 == 0:
            tier.delete(make_key((number + 1) % 23))
        over += tier.usage().num_bytes > tier.budget_bytes
    return over


@pytest.mark.parametrize(("budget_tokens", "num_threads"), covering([37, 10, 1, 0], [4, 1]))
def test_bytes_that_exist_never_exceed_the_budget(live: LiveBytes, budget_tokens: int, num_threads: int) -> None:
    budget = budget_tokens * BYTES_PER_TOKEN
    tier = MemoryTier(budget, LRU())
    with ThreadPoolExecutor(num_threads) as threads:
        assert sum(threads.map(lambda seed: churn(tier, seed, 600 // num_threads), range(num_threads))) == 0
    assert live.highest <= budget
    if budget_tokens >= 10:
        assert live.highest > budget // 2, "the budget is used, too"
        assert tier.evictions > 0
    assert live.now == tier.usage().num_bytes
    tier.close()
    assert tier.usage() == TierUsage(0, 0)
    assert live.now == 0


@settings(max_examples=100, deadline=None)
@given(
    budget_tokens=st.integers(0, 12),
    operations=st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(0, 7)), max_size=60),
)
def test_what_is_held_equals_a_model(budget_tokens: int, operations: list[tuple[str, int]]) -> None:
    """Block n has n tokens. The model: a list by last use, from which the front goes until the newcomer fits."""
    tier, model = MemoryTier(budget_tokens * BYTES_PER_TOKEN, LRU()), []
    evictions = 0
    for name, number in operations:
        if name == "put":
            kept = tier.put(make_key(number), make_block(number, num_tokens=number)) is not None
            model = [held for held in model if held != number]
            assert kept == (number <= budget_tokens)
            if kept:
                while sum(model) + number > budget_tokens:
                    model.pop(0)
                    evictions += 1
                model.append(number)
        elif name == "get":
            got = tier.get(make_key(number))
            assert (got is not None) == (number in model)
            if got is not None:
                assert got.equal(make_block(number, num_tokens=number))
                model = [held for held in model if held != number] + [number]
            del got
        else:
            tier.delete(make_key(number))
            model = [held for held in model if held != number]
        assert sorted(tier.keys()) == sorted(make_key(number) for number in model)
        assert tier.usage() == TierUsage(len(model), sum(model) * BYTES_PER_TOKEN)
    assert tier.evictions == evictions


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize(
    "make",
    [lambda budget: MemoryTier(budget, LRU()), lambda budget: DeviceTier(torch.device("cpu"), budget, LRU())],
    ids=["memory", "device"],
)
def test_the_budget_holds_to_the_byte(make: Callable[[int], BudgetedTier], missing: int) -> None:
    """What fits exactly is kept beside what is there; with one byte less it is not, or something goes for it."""
    lone = make(5 * BYTES_PER_TOKEN - missing)
    assert (lone.put(make_key(1), make_block(1)) is None) == bool(missing)
    tier = make(12 * BYTES_PER_TOKEN - missing)
    for number in (3, 4, 5):
        assert tier.put(make_key(number), make_block(number, num_tokens=number)) is not None
    assert set(tier.keys()) == {make_key(number) for number in ((4, 5) if missing else (3, 4, 5))}
    assert tier.usage().num_bytes <= tier.budget_bytes
    tight = make(8 * BYTES_PER_TOKEN - missing)
    for number, num_tokens in ((3, 3), (4, 4), (5, 4)):
        assert tight.put(make_key(number), make_block(number, num_tokens=num_tokens)) is not None
    assert set(tight.keys()) == {make_key(number) for number in ((5,) if missing else (4, 5))}


def test_a_block_in_use_is_not_evicted_and_a_newcomer_is_not_kept() -> None:
    tier = MemoryTier(10 * BYTES_PER_TOKEN, LRU())
    tier.put(make_key(1), make_block(1))
    tier.put(make_key(2), make_block(2))
    used = tier.get(make_key(1))
    tier.get(make_key(2))
    assert tier.put(make_key(3), make_block(3)) is not None, "the second one goes, though it was used last"
    assert sorted(tier.keys()) == sorted([make_key(1), make_key(3)])
    assert tier.put(make_key(4), make_block(4, num_tokens=6)) is None, "only five tokens can be given up"
    assert used is not None
    view = used.layer_keys(1)[:, 2:]
    del used
    assert tier.put(make_key(4), make_block(4, num_tokens=10)) is None, "a view of it is in use still"
    del view
    assert tier.put(make_key(4), make_block(4, num_tokens=10)) is not None


def test_what_is_deleted_while_in_use_is_counted_until_it_is_not(live: LiveBytes) -> None:
    tier = MemoryTier(10 * BYTES_PER_TOKEN, LRU())
    tier.put(make_key(1), make_block(1))
    used = tier.get(make_key(1))
    tier.delete(make_key(1))
    assert make_key(1) not in tier
    assert tier.usage() == TierUsage(0, 5 * BYTES_PER_TOKEN)
    assert live.now == 5 * BYTES_PER_TOKEN
    assert tier.put(make_key(2), make_block(2, num_tokens=6)) is None
    del used
    assert tier.usage() == TierUsage(0, 0)
    assert tier.put(make_key(2), make_block(2, num_tokens=10)) is not None


def test_looking_is_no_use() -> None:
    tier = MemoryTier(10 * BYTES_PER_TOKEN, LRU())
    tier.put(make_key(1), make_block(1))
    tier.put(make_key(2), make_block(2))
    assert make_key(1) in tier
    tier.put(make_key(3), make_block(3))
    assert sorted(tier.keys()) == sorted([make_key(2), make_key(3)])


def test_a_failed_copy_gives_its_reservation_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier(10 * BYTES_PER_TOKEN, LRU())

    def fail(tensor: Tensor, **options: object) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(memory, "private_copy", fail)
        with pytest.raises(MemoryError):
            tier.put(make_key(1), make_block(1, num_tokens=10))
    assert tier.usage() == TierUsage(0, 0)
    assert tier.put(make_key(1), make_block(1, num_tokens=10)) is not None


def test_the_policy_learns_sizes_and_tokens() -> None:
    seen: list[Entry] = []

    class Spy(LRU):
        def insert(self, entry: Entry) -> None:
            seen.append(entry)
            super().insert(entry)

    MemoryTier(1 << 20, Spy()).put(make_key(1), make_block(1, num_tokens=7))
    assert seen == [Entry(make_key(1), 7 * BYTES_PER_TOKEN, 7)]
