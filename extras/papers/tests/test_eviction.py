"""Eviction policies against their formulas, and the admission filter."""

from collections import Counter
from itertools import islice

import pytest
from blocks import make_block, make_key
from eviction_model import MODELS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache.errors import ConfigError
from ragcache.store import hyperbolic
from ragcache.store.eviction import ADMISSIONS, LRU, POLICIES, Entry, EvictionPolicy, get_policy
from ragcache.store.hyperbolic import Hyperbolic
from ragcache.store.tiers import MemoryTier
from ragcache_papers.tinylfu import CountMinSketch, TinyLFU

KEYS = st.sampled_from([f"key{number}" for number in range(12)])
BYTES = st.sampled_from([1, 2, 4, 8, 16])


class Against(RuleBasedStateMachine):
    """A policy next to its model, which must choose the same victims."""

    name: str
    policy: EvictionPolicy

    def __init__(self) -> None:
        super().__init__()
        self.model = MODELS[self.name]()

    @rule(key=KEYS, num_bytes=BYTES)
    def insert(self, key: str, num_bytes: int) -> None:
        if key not in self.model.held:
            self.policy.insert(Entry(key, num_bytes, 1))
            self.model.insert(key, num_bytes)

    @rule(key=KEYS, times=st.integers(1, 4))
    def touch(self, key: str, times: int) -> None:
        for _ in range(times):
            self.policy.touch(key)
            self.model.touch(key)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        self.policy.remove(key)
        self.model.remove(key)

    @precondition(lambda self: self.model.held)
    @rule(count=st.integers(1, 3))
    def make_room(self, count: int) -> None:
        victims = list(islice(self.policy.victims(), count))
        assert victims == self.model.order()[:count]
        for key in victims:
            self.policy.evict(key)
            self.model.evict(key)

    @invariant()
    def all_victims_in_order(self) -> None:
        for _ in range(2):
            assert list(self.policy.victims()) == self.model.order(), "asking for victims changes nothing"


def machine(name: str, policy: EvictionPolicy, title: str) -> type:
    def start(self) -> None:
        Against.__init__(self)
        self.policy = policy()

    case = type(title, (Against,), {"__init__": start, "name": name}).TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return case


TestLRU = machine("lru", LRU, "LRUMachine")
TestHyperbolic = machine("hyperbolic", Hyperbolic, "HyperbolicMachine")
TestFiltered = machine("hyperbolic", lambda: TinyLFU(Hyperbolic()), "FilteredMachine")  # keeps the order


def filled(keys: range) -> Hyperbolic:
    policy = Hyperbolic()
    for key in keys:
        policy.insert(Entry(str(key), 1, 1))
    return policy


def test_entries_no_longer_used_are_evicted() -> None:
    policy = filled(range(4))
    for _ in range(8):
        policy.touch("0")
    for key in range(4, 2000):
        policy.evict(next(policy.victims()))
        policy.insert(Entry(str(key), 1, 1))
    assert "0" not in set(policy.victims())


def test_ghosts_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperbolic, "GHOSTS", 16)
    policy = filled(range(4))
    for key in range(4, 500):
        policy.evict(next(policy.victims()))
        policy.insert(Entry(str(key), 1, 1))
    assert len(policy._ghosts) == 16
    for key in list(policy._ghosts):
        policy.remove(key)
    assert not policy._ghosts
    assert len(policy._recent) <= 4


def test_finding_a_victim_looks_at_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test counts logarithms, not seconds: there is at most a single logarithm for each group of entries."""
    policy = filled(range(2000))
    for number in range(6000):
        policy.touch(str(number * number % 2000))
    looked: list[float] = []
    plain = hyperbolic.math.log2
    monkeypatch.setattr(hyperbolic.math, "log2", lambda value: looked.append(value) or plain(value))
    next(policy.victims())
    assert len(looked) <= len(policy._groups) + 1 < 40


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
    """Without collisions, a sketch is a table of counters that are halved after a fixed number of keys."""
    sketch, counts, seen = CountMinSketch(1 << 12, sample), Counter(), 0
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
    """Block n has n tokens. The tier holds the bytes that it reports, never more than its budget, and the policy has
    the same keys.
    """
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


def test_a_tier_distinguishes_eviction_from_deletion() -> None:
    size = make_block(0).num_bytes
    policy = Hyperbolic()
    tier = MemoryTier(2 * size, policy)
    for number in range(3):
        tier.put(make_key(number), make_block(0))
    assert list(policy._ghosts) == [make_key(0)], "an evicted block's uses are remembered"
    tier.delete(make_key(1))
    assert list(policy._ghosts) == [make_key(0)], "a deleted block's are not"
