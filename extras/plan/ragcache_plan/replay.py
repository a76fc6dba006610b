"""Replays a trace against tiers without a model: the stores' own policies over numbers instead of tensors."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import ConfigError
from ragcache.store.eviction import ADMISSIONS, LRU, POLICIES, Entry, EvictionPolicy, get_policy
from ragcache.store.ledger import ByteLedger
from ragcache_plan.accesses import Accesses, Ints, Workload, generated
from ragcache_plan.plan import Corpus, Demand, Plan
from ragcache_plan.rates import MachineRates


class SimulatedTier:
    """Blocks that a tier would hold, by the ledger of a tier in memory. budget_bytes: None keeps everything."""

    def __init__(self, name: str, budget_bytes: int | None, policy: EvictionPolicy) -> None:
        self.name = name
        self.ledger = ByteLedger(sys.maxsize, LRU()) if budget_bytes is None else ByteLedger(budget_bytes, policy)
        self.hits = self.read_bytes = self.written_bytes = 0

    def get(self, entry: Entry) -> bool:
        self.ledger.touch(entry.key)
        if entry.key not in self.ledger:
            return False
        self.hits += 1
        self.read_bytes += entry.num_bytes
        return True

    def put(self, entry: Entry) -> None:
        """Replace what has the same key, where there is room and the policy finds it worth what has to go."""
        self.ledger.remove(entry.key)
        claim = self.ledger.claim(entry)
        if claim is not None:
            self.ledger.settle(claim)
            self.ledger.add(entry)
            self.written_bytes += entry.num_bytes


@dataclass(frozen=True)
class Budgets:
    """memory_bytes, and disk_bytes: None keeps every block, as the disk tier does.

    eager: every block is on disk before the first request, as far as they fit; else each is computed when it is asked
    for first
    """

    memory_bytes: int
    disk_bytes: int | None = None
    eager: bool = True


@dataclass(frozen=True, eq=False)
class Replayed:
    """The outcome of a replay. hits, read_bytes, written_bytes and evictions by tier; ttft_s: [requests]."""

    accesses: int
    computed: int
    computed_tokens: int
    hits: dict[str, int]
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    evictions: dict[str, int]
    ttft_s: NDArray[np.float64] = field(repr=False)


def replay(
    trace: Accesses, budgets: Budgets, policy: str, admission: str, rates: MachineRates, question_tokens: int = 30
) -> Replayed:
    """Requests one after another, as a store serves them: all lookups, each promoting what it finds to the faster tier,
    then the blocks that no tier had, which go to the durable tier first."""
    entries = [
        Entry(str(number), num_bytes, num_tokens)
        for number, (num_bytes, num_tokens) in enumerate(
            zip(trace.num_bytes.tolist(), trace.num_tokens.tolist(), strict=True)
        )
    ]
    count = len(entries)
    memory = SimulatedTier("memory", budgets.memory_bytes, get_policy(policy, admission, rates.prefill, count))
    disk = SimulatedTier("disk", budgets.disk_bytes, get_policy(policy, admission, rates.prefill, count))
    if budgets.eager:
        for entry in entries:
            disk.put(entry)
        disk.written_bytes = disk.ledger.evictions = 0
    seconds, computed, tokens = _serve(trace, entries, memory, disk, rates, question_tokens)
    tiers = (memory, disk)
    return Replayed(
        accesses=len(trace),
        computed=computed,
        computed_tokens=tokens,
        hits={tier.name: tier.hits for tier in tiers},
        read_bytes={tier.name: tier.read_bytes for tier in tiers},
        written_bytes={tier.name: tier.written_bytes for tier in tiers},
        evictions={tier.name: tier.ledger.evictions for tier in tiers},
        ttft_s=seconds,
    )


def _serve(
    trace: Accesses,
    entries: Sequence[Entry],
    memory: SimulatedTier,
    disk: SimulatedTier,
    rates: MachineRates,
    question_tokens: int,
) -> tuple[NDArray[np.float64], int, int]:
    """Seconds to the first token of every request; blocks and tokens that were computed."""
    place_s, read_s = 1 / rates.memory_bytes_s, 1 / rates.disk_bytes_s
    floor_s = rates.prefill_s(question_tokens)
    compute_s = {tokens: rates.prefill_s(tokens) for tokens in np.unique(trace.num_tokens).tolist()}
    blocks, starts = trace.blocks.tolist(), trace.starts.tolist()
    ttft = np.empty(trace.requests)
    computed = computed_tokens = 0
    for request in range(trace.requests):
        seconds = floor_s
        missing: dict[str, Entry] = {}
        for number in blocks[starts[request] : starts[request + 1]]:
            entry = entries[number]
            seconds += entry.num_bytes * place_s
            if memory.get(entry):
                continue
            if disk.get(entry):
                seconds += entry.num_bytes * read_s
                memory.put(entry)
            else:
                computed += 1
                missing[entry.key] = entry
        for entry in missing.values():
            seconds += compute_s[entry.num_tokens]
            computed_tokens += entry.num_tokens
            disk.put(entry)
            memory.put(entry)
        ttft[request] = seconds
    return ttft, computed, computed_tokens


# The most hits that any policy could have had: what a policy that knew the future would do.


class Optimum(NamedTuple):
    """hits:  of Belady's rule, which gives up what is used again last. For blocks of equal size that is the optimum;
           otherwise it is what one rule that knows the future reaches, and a policy may do better
    bound: no policy has more hits; equal to `hits` for equal sizes
    exact: whether the sizes are equal
    """

    hits: int
    bound: int
    exact: bool


def optimum(trace: Accesses, budget_bytes: int) -> Optimum:
    """For one tier of so many bytes that is empty at first and may refuse newcomers."""
    following = next_uses(trace.blocks)
    hits = _belady(trace, following, budget_bytes)
    if trace.equal_sizes:
        return Optimum(hits, hits, True)
    return Optimum(hits, max(hits, _bound(trace, following, budget_bytes)), False)


def next_uses(blocks: Ints) -> Ints:
    """For every access, the place of the next one to the same block; the trace's length where there is none."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks), dtype=np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def _belady(trace: Accesses, following: Ints, budget_bytes: int) -> int:
    """Belady 1966 (MIN), with the newcomer among what may be given up."""
    end, hits, used = len(trace), 0, 0
    sizes = trace.num_bytes.tolist()
    held: dict[int, int] = {}  # block -> its next use
    furthest: list[tuple[int, int]] = []  # (-next use, block); out of date where `held` says otherwise
    for block, again in zip(trace.blocks.tolist(), following.tolist(), strict=True):
        if held.pop(block, None) is not None:
            hits += 1
            used -= sizes[block]
        if again == end or sizes[block] > budget_bytes:
            continue
        held[block] = again
        used += sizes[block]
        heapq.heappush(furthest, (-again, block))
        while used > budget_bytes:
            negative, victim = heapq.heappop(furthest)
            if held.get(victim) == -negative:
                del held[victim]
                used -= sizes[victim]
    return hits


def _bound(trace: Accesses, following: Ints, budget_bytes: int) -> int:
    """Berger, Beckmann and Harchol-Balter 2018 (PFOO-L): a hit takes its block's bytes for as long as it waits. All
    hits together cannot take more than the budget over the whole trace: the cheapest that fit are at least as many."""
    reused = following < len(trace)
    sizes = trace.num_bytes[trace.blocks[reused]]
    waits = (following - np.arange(len(trace)))[reused]
    costs = np.sort((sizes * waits)[sizes <= budget_bytes].astype(np.float64))
    return int(np.searchsorted(np.cumsum(costs), float(budget_bytes) * len(trace), side="right"))


# Budgets and policies compared over one trace.


QUANTILES = (50, 95, 99)


@dataclass(frozen=True)
class Outcome:
    """One policy under one budget.

    hit_rate:       share of the accesses that each tier served
    computed_rate:  share that none served
    read_bytes, written_bytes, evictions: by tier
    ttft_s:         seconds to the first token, estimated from the rates, at "p50", "p95" and "p99" of the requests
    optimum_rate:   hits in memory of Belady's rule, which knows the future: the optimum where all blocks have one size
    bound_rate:     no policy has more hits in memory
    optimum_exact:  whether the sizes are equal
    """

    policy: str
    admission: str
    memory_bytes: int
    disk_bytes: int | None
    requests: int
    accesses: int
    hit_rate: dict[str, float]
    computed_rate: float
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    evictions: dict[str, int]
    ttft_s: dict[str, float]
    optimum_rate: float
    bound_rate: float
    optimum_exact: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def simulate(
    trace: Accesses,
    budgets: Sequence[Budgets],
    policies: Sequence[str],
    admissions: Sequence[str] = ("all",),
    rates: MachineRates | None = None,
    question_tokens: int = 30,
) -> Iterator[Outcome]:
    """Every budget with every policy and every admission filter. Raises ConfigError, also for a memory budget that is
    smaller than every block."""
    if not len(trace):
        raise ConfigError("there is no access to simulate")
    rates = rates or MachineRates()
    for budget in budgets:
        least = int(trace.num_bytes.min())
        if budget.memory_bytes < 0 or 0 < budget.memory_bytes < least:
            raise ConfigError(
                f"a memory budget of {budget.memory_bytes:,} bytes holds no block: the smallest has {least:,}; give "
                "more, or 0 for none"
            )
        if trace.never_read and budget.eager and budget.disk_bytes is not None:
            raise ConfigError(
                f"a disk budget that is full of {trace.never_read + len(trace.num_bytes):,} blocks at the start is not "
                "simulated; give no --disk, --kv lazy, or a million --blocks at most"
            )
        best = optimum(trace, budget.memory_bytes)
        for policy in policies:
            for admission in admissions:
                done = replay(trace, budget, policy, admission, rates, question_tokens)
                yield _outcome(trace, budget, policy, admission, done, best)


def _outcome(trace: Accesses, budget: Budgets, policy: str, admission: str, done: Replayed, best: Optimum) -> Outcome:
    total = done.accesses
    quantiles = np.percentile(done.ttft_s, QUANTILES, method="inverted_cdf").tolist()
    return Outcome(
        policy=policy,
        admission=admission,
        memory_bytes=budget.memory_bytes,
        disk_bytes=budget.disk_bytes,
        requests=trace.requests,
        accesses=total,
        hit_rate={tier: hits / total for tier, hits in done.hits.items()},
        computed_rate=done.computed / total,
        read_bytes=done.read_bytes,
        written_bytes=done.written_bytes,
        evictions=done.evictions,
        ttft_s={f"p{quantile}": seconds for quantile, seconds in zip(QUANTILES, quantiles, strict=True)},
        optimum_rate=best.hits / total,
        bound_rate=best.bound / total,
        optimum_exact=best.exact,
    )


# Which eviction policy suits a planned deployment, by simulation.


MOST_BLOCKS = 20_000
ACCESSES = 60_000
WORTH = 0.01  # a policy has to serve so much more from memory than a plainer one


class PolicyAdvice(NamedTuple):
    """policy, admission: what to open the store with; memory_share: of the KV that is kept, held in memory at once"""

    policy: str
    admission: str
    memory_share: float
    reason: str


def advise_policy(plan: Plan, corpus: Corpus, demand: Demand, rates: MachineRates, memory_bytes: int) -> PolicyAdvice:
    """The plainest policy whose hits in memory come close to the most of all, over a stream of requests as planned.

    A large corpus is scaled down together with the memory.
    """
    kept = plan.advised.corpus_bytes if plan.keep == "all" else plan.advised.hot_bytes
    share = 1.0 if kept <= 0 else min(1.0, memory_bytes / kept)
    if plan.keep == "none" or share == 1:
        return PolicyAdvice(
            "lru", "all", share, "policy lru: all KV that is kept fits in memory, so nothing is given up"
        )
    chunks = corpus.chunks if plan.keep == "all" else plan.advised.hot_chunks
    blocks = min(chunks, MOST_BLOCKS)
    tokens = max(1, round(corpus.num_tokens / corpus.chunks))
    k = max(1, min(blocks, round(demand.context_tokens / tokens)))
    workload = Workload(
        max(1, ACCESSES // k), k, blocks, demand.zipf, tokens=(tokens, tokens), bytes_per_token=1, seed=0
    )
    budget = Budgets(max(tokens, int(share * blocks * tokens)))
    found = list(simulate(generated(workload), [budget], list(POLICIES), list(ADMISSIONS), rates))
    most = max(outcome.hit_rate["memory"] for outcome in found)
    best = next(outcome for outcome in found if outcome.hit_rate["memory"] >= most - WORTH)
    plain = found[0]
    reason = (
        f"policy {best.policy}, admission {best.admission}: memory holds {share:.1%} of the KV that is kept and serves "
        f"{best.hit_rate['memory']:.1%} of the reads ({plain.policy} {plain.hit_rate['memory']:.1%}, optimum "
        f"{best.optimum_rate:.1%}; simulated, popularity r^-{demand.zipf:g})"
    )
    return PolicyAdvice(best.policy, best.admission, share, reason)
