"""The memory tier's budget is never exceeded, and room is made only where that helps."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from blocks import make_block, make_key
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.errors import ConfigError
from ragcache.store.eviction import LRU, Entry
from ragcache.store.tiers import MemoryTier, Usage, memory

BYTES_PER_TOKEN = make_block(0, num_tokens=1).num_bytes


class LiveBytes:
    """Counts the bytes of the tensors that exist, by their finalizers: it asks the tier nothing."""

    def __init__(self) -> None:
        self.now = 0
        self.highest = 0
        self._lock = threading.Lock()

    def watch(self, tensor: Tensor) -> Tensor:
        self._add(tensor.nbytes)
        weakref.finalize(tensor, self._add, -tensor.nbytes)
        return tensor

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.now += num_bytes
            self.highest = max(self.highest, self.now)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBytes]:
    live, copy = LiveBytes(), memory._private_copy
    monkeypatch.setattr(memory, "_private_copy", lambda tensor: live.watch(copy(tensor)))
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


@pytest.mark.parametrize("budget_tokens", [0, 1, 10, 37])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_bytes_that_exist_never_exceed_the_budget(live: LiveBytes, budget_tokens: int, num_threads: int) -> None:
    """With several threads each may have one block in hand that was evicted since `put` returned it: that one is in use
    and not the tier's any more."""
    budget = budget_tokens * BYTES_PER_TOKEN
    in_hand = 0 if num_threads == 1 else num_threads * 11 * BYTES_PER_TOKEN
    tier = MemoryTier(budget, LRU())
    with ThreadPoolExecutor(num_threads) as threads:
        assert sum(threads.map(lambda seed: churn(tier, seed, 600 // num_threads), range(num_threads))) == 0
    assert live.highest <= budget + in_hand
    if budget_tokens >= 10:
        assert live.highest > budget // 2, "the budget is used, too"
        assert tier.evictions > 0
    assert live.now == tier.usage().num_bytes
    tier.close()
    assert tier.usage() == Usage(0, 0)
    assert live.now == 0


@settings(max_examples=200)
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
            kept = tier.put(make_key(number), make_block(number, num_tokens=number))
            model = [held for held in model if held != number]
            assert (kept is not None) == (number <= budget_tokens)
            if kept is not None:
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
        else:
            tier.delete(make_key(number))
            model = [held for held in model if held != number]
        assert sorted(tier.keys()) == sorted(make_key(number) for number in model)
        assert tier.usage() == Usage(len(model), sum(model) * BYTES_PER_TOKEN)
    assert tier.evictions == evictions


def test_a_block_larger_than_the_budget_pushes_nothing_out() -> None:
    tier = MemoryTier(10 * BYTES_PER_TOKEN, LRU())
    tier.put(make_key(1), make_block(1, num_tokens=4))
    assert tier.put(make_key(2), make_block(2, num_tokens=11)) is None
    assert list(tier.keys()) == [make_key(1)]
    assert tier.evictions == 0


def test_a_block_in_use_stays_valid_when_it_is_evicted() -> None:
    tier = MemoryTier(5 * BYTES_PER_TOKEN, LRU())
    tier.put(make_key(1), make_block(1))
    used = tier.get(make_key(1))
    tier.put(make_key(2), make_block(2))
    assert make_key(1) not in tier
    assert used is not None
    assert used.equal(make_block(1))


def test_looking_is_no_use() -> None:
    tier = MemoryTier(10 * BYTES_PER_TOKEN, LRU())
    tier.put(make_key(1), make_block(1))
    tier.put(make_key(2), make_block(2))
    assert make_key(1) in tier
    tier.put(make_key(3), make_block(3))
    assert sorted(tier.keys()) == sorted([make_key(2), make_key(3)])


def test_a_failed_copy_gives_its_reservation_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier(10 * BYTES_PER_TOKEN, LRU())

    def fail(tensor: Tensor) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(memory, "_private_copy", fail)
        with pytest.raises(MemoryError):
            tier.put(make_key(1), make_block(1, num_tokens=10))
    assert tier.usage() == Usage(0, 0)
    assert tier.put(make_key(1), make_block(1, num_tokens=10)) is not None


def test_the_policy_learns_sizes_and_tokens() -> None:
    seen: list[Entry] = []

    class Spy(LRU):
        def insert(self, entry: Entry) -> None:
            seen.append(entry)
            super().insert(entry)

    MemoryTier(1 << 20, Spy()).put(make_key(1), make_block(1, num_tokens=7))
    assert seen == [Entry(make_key(1), 7 * BYTES_PER_TOKEN, 7)]


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1 bytes"):
        MemoryTier(-1, LRU())
