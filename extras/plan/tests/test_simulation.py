"""The simulator against a model without policies and against real stores, and Belady's rule against all schedules."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from blocks import make_block, make_key
from eviction_model import MODELS
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.errors import ConfigError
from ragcache.store.eviction import ADMISSIONS, POLICIES
from ragcache.store.kv_store import KVStore
from ragcache_plan.accesses import Accesses
from ragcache_plan.optimum import optimum
from ragcache_plan.rates import MachineRates
from ragcache_plan.replay import Budgets, replay
from ragcache_plan.simulation import simulate

RATES = MachineRates(1000.0, 0.2, 1e4, 1e3)
REQUESTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=25)
SIZES = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=6, max_size=6)


def make_trace(requests: list[list[int]], sizes: list[int]) -> Accesses:
    """Return a trace in which block n has sizes[n] bytes and as many tokens."""
    blocks = [block for request in requests for block in request]
    starts = np.cumsum([0, *(len(request) for request in requests)])
    return Accesses(np.array(blocks), starts, np.array(sizes), np.array(sizes))


class Model:
    """A tier as the model of a policy, with a budget and counts."""

    def __init__(self, budget: int | None, policy: str, filtered: bool, sizes: list[int]) -> None:
        self.budget, self.filtered, self.sizes = budget, filtered, sizes
        self.policy = MODELS[policy]()
        self.asked = [0] * len(sizes)

    def get(self, block: int) -> bool:
        self.asked[block] = min(15, self.asked[block] + 1)
        self.policy.touch(str(block))
        return str(block) in self.policy.held

    def put(self, block: int) -> None:
        if str(block) in self.policy.held:
            self.policy.remove(str(block))
        if self.budget is not None:
            room, victims = self.budget - sum(self.policy.held.values()), []
            for victim in self.policy.order():
                if room >= self.sizes[block]:
                    break
                victims.append(victim)
                room += self.policy.held[victim]
            outweighed = self.asked[block] > sum(self.asked[int(victim)] for victim in victims)
            if room < self.sizes[block] or (self.filtered and victims and not outweighed):
                return
            for victim in victims:
                self.policy.evict(victim)
        self.policy.insert(str(block), self.sizes[block])


def model_of(requests, sizes, memory_bytes, disk_bytes, eager, policy, filtered):
    """Return the tier that served each access, and each request's seconds."""
    memory, disk = (Model(budget, policy, filtered, sizes) for budget in (memory_bytes, disk_bytes))
    if eager:
        for block in range(len(sizes)):
            disk.put(block)
    origins, seconds = [], []
    for request in requests:
        wait = 30 * 0.8 / 1000 + 30**2 * 0.2 / 1000 / 1000
        missing = []
        for block in request:
            wait += sizes[block] / 1e4
            if memory.get(block):
                origins.append("memory")
            elif disk.get(block):
                origins.append("disk")
                wait += sizes[block] / 1e3
                memory.put(block)
            else:
                origins.append("computed")
                missing.append(block)
        for block in dict.fromkeys(missing):
            wait += sizes[block] * 0.8 / 1000 + sizes[block] ** 2 * 0.2 / 1000 / 1000
            disk.put(block)
            memory.put(block)
        seconds.append(wait)
    return origins, seconds


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=120, deadline=None)
@given(
    requests=REQUESTS,
    sizes=SIZES,
    memory_bytes=st.integers(0, 20),
    disk_bytes=st.none() | st.integers(0, 25),
    eager=st.booleans(),
)
def test_a_replay_equals_a_model(policy, admission, requests, sizes, memory_bytes, disk_bytes, eager):
    done = replay(make_trace(requests, sizes), Budgets(memory_bytes, disk_bytes, eager), policy, admission, RATES)
    origins, seconds = model_of(requests, sizes, memory_bytes, disk_bytes, eager, policy, admission != "all")
    blocks = [block for request in requests for block in request]
    for tier in ("memory", "disk"):
        served = [sizes[block] for block, origin in zip(blocks, origins, strict=True) if origin == tier]
        assert (done.hits[tier], done.read_bytes[tier]) == (len(served), sum(served))
        assert done.hit_tokens[tier] == sum(served), "block n has as many tokens as bytes"
    assert done.computed == origins.count("computed")
    np.testing.assert_allclose(done.ttft_s, seconds, rtol=1e-9)


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("eager", [True, False])
def test_a_replay_equals_a_store(policy, admission, eager, tmp_path):
    """A real store with tensors answers the same requests, and serves as many accesses from each tier."""
    random, sizes = np.random.default_rng(1), [3, 5, 7, 4, 6, 9]
    unit = make_block(0, num_tokens=1).num_bytes
    requests = [list(dict.fromkeys((random.zipf(1.6, 3) % 6).tolist())) for _ in range(60)]
    with KVStore(tmp_path / "kv", memory_bytes=14 * unit, eviction=policy, admission=admission) as store:
        if eager:
            for number, tokens in enumerate(sizes):
                store.put(make_key(number), make_block(number, num_tokens=tokens))
            store._tiers.volatile[0].close()
        for request in requests:
            for block in request:
                if store.get(make_key(block)) is None:
                    store.put(make_key(block), make_block(block, num_tokens=sizes[block]))
        stats = store.stats()
    alone = [[block] for request in requests for block in request]
    trace = Accesses.of(alone, unit * np.array(sizes), np.array(sizes))
    done = replay(trace, Budgets(14 * unit, None, eager), policy, admission, RATES)
    assert done.hits == stats.hits_by_tier
    assert done.computed == stats.misses
    assert done.evictions["memory"] <= stats.evictions  # the store counts evictions while it is filled, too


@cache
def _holdings(sizes: tuple[int, ...], budget: int) -> tuple[frozenset[int], ...]:
    every = range(len(sizes))
    subsets = (frozenset(some) for count in range(len(sizes) + 1) for some in combinations(every, count))
    return tuple(held for held in subsets if sum(sizes[block] for block in held) <= budget)


def best_hits(blocks: list[int], sizes: tuple[int, ...], budget: int, worth: tuple[int, ...] = (1,) * 5) -> int:
    """Return the most worth of hits in any schedule: after every access, each fitting subset of held blocks and
    newcomer.
    """
    best = {frozenset(): 0}
    for block in blocks:
        following: dict[frozenset, int] = {}
        for held, hits in best.items():
            now, there = hits + worth[block] * (block in held), held | {block}
            for kept in _holdings(sizes, budget):
                if kept <= there and following.get(kept, -1) < now:
                    following[kept] = now
        best = following
    return max(best.values())


@settings(max_examples=80, deadline=None)
@given(blocks=st.lists(st.integers(0, 4), min_size=1, max_size=16), budget=st.integers(0, 6))
def test_belady_is_the_optimum_for_equal_sizes(blocks, budget):
    found, best = optimum(make_trace([blocks], [2] * 5), budget), best_hits(blocks, (2,) * 5, budget)
    assert found == (best, best, True, 2 * best, 2 * best)


@settings(max_examples=80, deadline=None)
@given(
    blocks=st.lists(st.integers(0, 4), min_size=1, max_size=14),
    sizes=st.lists(st.integers(1, 4), min_size=5, max_size=5).filter(lambda sizes: len(set(sizes)) > 1),
    budget=st.integers(0, 8),
)
def test_for_unequal_sizes_the_optimum_lies_between(blocks, sizes, budget):
    found = optimum(make_trace([blocks], sizes), budget)
    assert not found.exact
    assert found.hits <= best_hits(blocks, tuple(sizes), budget) <= found.bound
    assert found.tokens <= best_hits(blocks, tuple(sizes), budget, tuple(sizes)) <= found.bound_tokens


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, sizes=SIZES, memory_bytes=st.integers(8, 20))
def test_no_policy_exceeds_the_bound(requests, sizes, memory_bytes):
    for outcome in simulate(make_trace(requests, sizes), [Budgets(memory_bytes)], list(POLICIES), list(ADMISSIONS)):
        assert outcome.hit_rate["memory"] <= outcome.bound_rate + 1e-12
        assert outcome.token_rate["memory"] <= outcome.bound_token_rate + 1e-12
        assert sum(outcome.hit_rate.values()) + outcome.computed_rate == pytest.approx(1)


def test_percentiles_are_those_of_requests():
    requests = [[0]] * 96 + [[1]] * 4
    trace = make_trace(requests, [1, 8])
    (outcome,) = simulate(trace, [Budgets(0)], ["lru"], rates=RATES, question_tokens=0)
    assert outcome.ttft_s == pytest.approx(
        {"p50": 1 / 1e4 + 1 / 1e3, "p95": 1 / 1e4 + 1 / 1e3, "p99": 8 / 1e4 + 8 / 1e3}
    )


def test_an_empty_trace_is_refused():
    with pytest.raises(ConfigError, match="no access"):
        list(simulate(make_trace([], []), [Budgets(1)], ["lru"]))


@pytest.mark.parametrize("budget", [-1, 1, 7])
def test_a_budget_below_one_block_is_refused(budget):
    with pytest.raises(ConfigError, match="smallest has 8"):
        list(simulate(make_trace([[0]], [8]), [Budgets(budget)], ["lru"]))
