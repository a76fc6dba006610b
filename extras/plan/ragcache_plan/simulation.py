"""Budgets and eviction policies compared over a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ragcache.errors import ConfigError
from ragcache_plan.accesses import Accesses
from ragcache_plan.optimum import Optimum, optimum
from ragcache_plan.rates import MachineRates
from ragcache_plan.replay import Budgets, Replayed, replay

QUANTILES = (50, 95, 99)


@dataclass(frozen=True)
class Outcome:
    """A policy under a budget.

    hit_rate:       share of the accesses that each tier served
    token_rate:     share of the accessed tokens that each tier served
    computed_rate:  share of the accesses that no tier served
    read_bytes, written_bytes, evictions: by tier
    ttft_s:         seconds to the first token, estimated from the rates, at "p50", "p95" and "p99" of the requests
    optimum_rate:   hits in memory of Belady's rule, which knows the future: the optimum if all blocks have the same
                    size
    bound_rate:     upper bound on the hits in memory of any policy
    optimum_token_rate, bound_token_rate: the same for tokens
    optimum_exact:  whether all blocks have the same size
    """

    policy: str
    admission: str
    memory_bytes: int
    disk_bytes: int | None
    requests: int
    accesses: int
    hit_rate: dict[str, float]
    token_rate: dict[str, float]
    computed_rate: float
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    evictions: dict[str, int]
    ttft_s: dict[str, float]
    optimum_rate: float
    bound_rate: float
    optimum_token_rate: float
    bound_token_rate: float
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
    """Yield the outcome of every budget with every policy and every admission filter.

    Raises ConfigError if there are no accesses, or if a memory budget is smaller than every block.
    """
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
        best = optimum(trace, budget.memory_bytes)
        for policy in policies:
            for admission in admissions:
                done = replay(trace, budget, policy, admission, rates, question_tokens)
                yield _outcome(trace, budget, policy, admission, done, best)


def _outcome(trace: Accesses, budget: Budgets, policy: str, admission: str, done: Replayed, best: Optimum) -> Outcome:
    total, tokens = done.accesses, max(1, trace.total_tokens)
    quantiles = np.percentile(done.ttft_s, QUANTILES, method="inverted_cdf").tolist()
    return Outcome(
        policy=policy,
        admission=admission,
        memory_bytes=budget.memory_bytes,
        disk_bytes=budget.disk_bytes,
        requests=trace.requests,
        accesses=total,
        hit_rate={tier: hits / total for tier, hits in done.hits.items()},
        token_rate={tier: hits / tokens for tier, hits in done.hit_tokens.items()},
        computed_rate=done.computed / total,
        read_bytes=done.read_bytes,
        written_bytes=done.written_bytes,
        evictions=done.evictions,
        ttft_s={f"p{quantile}": seconds for quantile, seconds in zip(QUANTILES, quantiles, strict=True)},
        optimum_rate=best.hits / total,
        bound_rate=best.bound / total,
        optimum_token_rate=best.tokens / tokens,
        bound_token_rate=best.bound_tokens / tokens,
        optimum_exact=best.exact,
    )
