"""Which eviction policy suits a planned deployment, by simulation."""

from __future__ import annotations

from typing import NamedTuple

from ragcache.store.eviction import ADMISSIONS, POLICIES
from ragcache_plan.accesses import Workload, generated
from ragcache_plan.plan import Corpus, Demand, Plan
from ragcache_plan.rates import MachineRates
from ragcache_plan.replay import Budgets
from ragcache_plan.simulate import simulate

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
