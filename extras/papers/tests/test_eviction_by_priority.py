"""LRU, GDSF, PGDSF and the admission filter against their formulas, evaluated anew for every entry each time."""

import heapq
import math
from collections import Counter
from itertools import islice

import pytest
from blocks import make_block, make_key
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache.errors import ConfigError
from ragcache.store.eviction import ADMISSIONS, POLICIES, Entry, EvictionPolicy, get_policy
from ragcache.store.lru import LRU
from ragcache.store.prefill_rate import PrefillRate
from ragcache.store.tiers import MemoryTier
from ragcache_papers.gdsf import GDSF, PGDSF, PriorityOrder
from ragcache_papers.tinylfu import CountMinSketch, TinyLFU

KEYS = st.sampled_from([f"key{number}" for number in range(12)])
# Powers of two, so that formulas give the same floats in whatever order they are evaluated.
BYTES = st.sampled_from([1, 2, 4, 8, 16])
TOKENS = st.sampled_from([1, 2, 4, 8])
QUADRATIC = 0.25


def lru_priority(clock: float, uses: int, num_bytes: int, num_tokens: int) -> float:
    return 0  # of equals the one whose last use is longest ago goes


def gdsf_priority(clock: float, uses: int, num_bytes: int, num_tokens: int) -> float:
    return clock + uses * 1 / num_bytes


def pgdsf_priority(clock: float, uses: int, num_bytes: int, num_tokens: int) -> float:
    return clock + uses * (num_tokens + QUADRATIC * num_tokens**2) / num_bytes


class Against(RuleBasedStateMachine):
    """The model: a list of entries with their last use, number of uses and the clock at that use; sorted when asked."""

    policy: EvictionPolicy
    priority: staticmethod

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.time = 0
        self.held: dict[str, tuple[int, int, int, int, float]] = {}  # bytes, tokens, uses, last use, clock then

    def order(self) -> list[str]:
        def rank(key: str) -> tuple[float, int]:
            num_bytes, num_tokens, uses, last, clock = self.held[key]
            return self.priority(clock, uses, num_bytes, num_tokens), last

        return sorted(self.held, key=rank)

    @rule(key=KEYS, num_bytes=BYTES, num_tokens=TOKENS)
    def insert(self, key: str, num_bytes: int, num_tokens: int) -> None:
        if key not in self.held:
            self.time += 1
            self.policy.insert(Entry(key, num_bytes, num_tokens))
            self.held[key] = (num_bytes, num_tokens, 1, self.time, self.clock)

    @rule(key=KEYS, times=st.integers(1, 4))
    def touch(self, key: str, times: int) -> None:
        for _ in range(times):
            self.policy.touch(key)
            if key in self.held:
                self.time += 1
                num_bytes, num_tokens, uses, _, _ = self.held[key]
                self.held[key] = (num_bytes, num_tokens, uses + 1, self.time, self.clock)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        self.policy.remove(key)
        self.held.pop(key, None)

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 3))
    def make_room(self, count: int) -> None:
        expected = self.order()[:count]
        victims = list(islice(self.policy.victims(), count))
        assert victims == expected
        for key in victims:
            num_bytes, num_tokens, uses, _, clock = self.held.pop(key)
            self.clock = max(self.clock, self.priority(clock, uses, num_bytes, num_tokens))
            self.policy.evict(key)

    @invariant()
    def all_victims_in_order(self) -> None:
        for _ in range(2):
            assert list(self.policy.victims()) == self.order(), "asking for victims changes nothing"


def machine(name: str, policy, priority) -> type:
    def start(self) -> None:
        Against.__init__(self)
        self.policy = policy()

    case = type(name, (Against,), {"__init__": start, "priority": staticmethod(priority)}).TestCase
    case.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    return case


TestLRU = machine("LRUMachine", LRU, lru_priority)
TestGDSF = machine("GDSFMachine", GDSF, gdsf_priority)
TestPGDSF = machine("PGDSFMachine", lambda: PGDSF(PrefillRate(1.0, QUADRATIC)), pgdsf_priority)
TestFiltered = machine("FilteredMachine", lambda: TinyLFU(GDSF()), gdsf_priority)  # a filter changes no order


def test_the_heap_stays_as_small_as_what_is_held() -> None:
    order = PriorityOrder()
    for number in range(2000):
        order.put(str(number), number)
        for _ in range(5):
            order.put(str(number), number + 1)
        if number >= 10:
            order.remove(str(number - 10))
    assert len(order._heap) <= 40


def test_finding_a_victim_looks_at_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in heap operations, not in seconds: n uses and n evictions among n entries."""
    count = 0

    def counted(function):
        def call(*arguments):
            nonlocal count
            count += 1
            return function(*arguments)

        return call

    for name in ("heappush", "heappop", "heapreplace"):
        monkeypatch.setattr(heapq, name, counted(getattr(heapq, name)))
    policy, n = GDSF(), 2000
    for number in range(n):
        policy.insert(Entry(str(number), 1 + number % 7, 1))
    for number in range(n):
        policy.touch(str(number * 37 % n))
    for number in range(n):
        policy.evict(next(policy.victims()))
        policy.insert(Entry(f"new{number}", 1 + number % 7, 1))
    assert count < 12 * n


def test_longer_chunks_are_worth_more_a_byte_when_attention_costs() -> None:
    policy = PGDSF(PrefillRate(1.0, 0.001))
    policy.insert(Entry("long", 1000, 1000))
    policy.insert(Entry("short", 100, 100))
    assert list(policy.victims()) == ["short", "long"]


@settings(deadline=None)
@given(keys=st.lists(KEYS, max_size=100), width=st.integers(1, 64))
def test_a_sketch_is_never_too_low(keys: list[str], width: int) -> None:
    sketch, seen = CountMinSketch(width, sample=1000), Counter(keys)
    for key in keys:
        sketch.add(key)
    for key, count in seen.items():
        assert min(15, count) <= sketch.estimate(key) <= 15


@settings(deadline=None)
@given(keys=st.lists(KEYS, max_size=120), sample=st.integers(1, 40))
def test_a_wide_sketch_counts_and_ages(keys: list[str], sample: int) -> None:
    """Without collisions it is a table of counters that are halved after every so many keys."""
    sketch, counts, seen = CountMinSketch(1 << 16, sample), Counter(), 0
    for key in keys:
        sketch.add(key)
        counts[key] = min(15, counts[key] + 1)
        seen += 1
        if seen == sample:
            counts = Counter({name: count // 2 for name, count in counts.items()})
            seen //= 2
        assert {name: sketch.estimate(name) for name in counts} == dict(counts)


@pytest.mark.parametrize(("width", "sample"), [(0, None), (-1, 5), (8, 0)])
def test_no_sketch_without_counters(width: int, sample: int | None) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        CountMinSketch(width, sample)


def test_who_is_admitted() -> None:
    policy = TinyLFU(LRU())
    for key, times in {"a": 3, "b": 2, "c": 1}.items():
        policy.insert(Entry(key, 1, 1))
        for _ in range(times):
            policy.touch(key)
    for _ in range(5):
        policy.touch("often")
    policy.touch("once")
    assert policy.admits("once", [])
    assert policy.admits("never", [])
    assert not policy.admits("never", ["c"])
    assert not policy.admits("once", ["c"]), "as often is not more often"
    assert policy.admits("often", ["a"])
    assert not policy.admits("often", ["a", "b"]), "several have to be outweighed together"


def test_chunks_seen_once_do_not_push_out_the_hot_ones() -> None:
    size = make_block(0).num_bytes
    hot = [make_key(number) for number in range(4)]

    def hits_after_scan(admission: str) -> int:
        tier = MemoryTier(4 * size, get_policy("lru", admission))

        def ask(key: str) -> bool:
            found = tier.get(key) is not None
            if not found:
                tier.put(key, make_block(0))
            return found

        for _ in range(3):
            for key in hot:
                ask(key)
        for number in range(100, 150):
            ask(make_key(number))
        return sum(ask(key) for key in hot)

    assert hits_after_scan("tinylfu") == 4
    assert hits_after_scan("all") == 0


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(
    budget_tokens=st.integers(0, 12),
    operations=st.lists(st.tuples(st.sampled_from(["ask", "put", "delete"]), st.integers(0, 7)), max_size=50),
)
def test_a_budget_holds_under_every_policy(
    name: str, admission: str, budget_tokens: int, operations: list[tuple[str, int]]
) -> None:
    """Block n has n tokens. What the tier says it holds, it holds; the policy holds the same keys; never too many."""
    unit, policy = make_block(0, num_tokens=1).num_bytes, get_policy(name, admission)
    tier = MemoryTier(budget_tokens * unit, policy)
    for operation, number in operations:
        key = make_key(number)
        if operation == "delete":
            tier.delete(key)
        elif operation == "put" or tier.get(key) is None:
            kept = tier.put(key, make_block(number, num_tokens=number)) is not None
            assert kept == (key in tier)
        held = {made: n for n in range(8) if (made := make_key(n)) in tier}
        assert sorted(held) == sorted(tier.keys()) == sorted(policy.victims())
        assert tier.usage() == (len(held), sum(held.values()) * unit)
        assert sum(held.values()) <= budget_tokens


def test_the_tier_tells_the_policy_what_was_evicted() -> None:
    size = make_block(0).num_bytes
    policy = GDSF()
    tier = MemoryTier(2 * size, policy)
    for number in range(3):
        tier.put(make_key(number), make_block(0))
    assert math.isclose(policy._clock, 1 / size)
    tier.delete(make_key(1))
    tier.delete(make_key(2))
    assert math.isclose(policy._clock, 1 / size), "a deletion teaches nothing"
