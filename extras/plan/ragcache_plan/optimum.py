"""The most hits that any eviction policy could have had over a trace: those of a policy that knows the future."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from ragcache_plan.accesses import Accesses, Ints


class Optimum(NamedTuple):
    """Bounds on the hits of any policy.

    hits:  of Belady's rule, which evicts the block whose next use is latest. For blocks of equal size that is the
           optimum; otherwise it is the result of a rule that knows the future, and a policy may do better
    bound: no policy has more hits; equal to `hits` for equal sizes
    exact: whether the sizes are equal
    """

    hits: int
    bound: int
    exact: bool


def optimum(trace: Accesses, budget_bytes: int) -> Optimum:
    """Return the optimum of a tier of this many bytes that is empty at first and may refuse new blocks."""
    following = next_uses(trace.blocks)
    hits = _belady(trace, following, budget_bytes)
    if trace.equal_sizes:
        return Optimum(hits, hits, True)
    return Optimum(hits, max(hits, _bound(trace, following, budget_bytes)), False)


def next_uses(blocks: Ints) -> Ints:
    """Return, for every access, the place of the next access to the same block, else the trace's length."""
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
