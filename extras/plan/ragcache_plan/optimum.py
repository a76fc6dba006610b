"""The most hits that any eviction policy could have had over a trace: those of a policy that knows the future."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from ragcache_plan.accesses import Accesses, Ints


class Optimum(NamedTuple):
    """Bounds on the hits of any policy, and on the tokens of these hits.

    hits, tokens: of Belady's rule, which evicts the block whose next use is latest. For blocks of equal size that is
                  the optimum; otherwise it is the result of a rule that knows the future, and a policy may do better
    bound, bound_tokens: upper bounds for every policy; equal to Belady's if all sizes are equal
    exact:        whether all sizes are equal
    """

    hits: int
    bound: int
    exact: bool
    tokens: int
    bound_tokens: int


def optimum(trace: Accesses, budget_bytes: int) -> Optimum:
    """Return the optimum of a tier of this many bytes that is empty at first and may refuse new blocks."""
    following = next_uses(trace.blocks)
    hits, tokens = _belady(trace, following, budget_bytes)
    if trace.equal_sizes and len(np.unique(trace.num_tokens)) < 2:
        return Optimum(hits, hits, True, tokens, tokens)
    bound = _bound(trace, following, budget_bytes, np.ones_like(trace.num_tokens))
    bound_tokens = _bound(trace, following, budget_bytes, trace.num_tokens)
    return Optimum(hits, max(hits, bound), False, tokens, max(tokens, bound_tokens))


def next_uses(blocks: Ints) -> Ints:
    """Return, for every access, the place of the next access to the same block, else the trace's length."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks), dtype=np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def _belady(trace: Accesses, following: Ints, budget_bytes: int) -> tuple[int, int]:
    """Return the hits and their tokens of Belady 1966 (MIN), with the newcomer among the possible victims."""
    end, hits, hit_tokens, used = len(trace), 0, 0, 0
    tokens = trace.num_tokens.tolist()
    sizes = trace.num_bytes.tolist()
    held: dict[int, int] = {}  # block -> its next use
    furthest: list[tuple[int, int]] = []  # (-next use, block); out of date where `held` says otherwise
    for block, again in zip(trace.blocks.tolist(), following.tolist(), strict=True):
        if held.pop(block, None) is not None:
            hits += 1
            hit_tokens += tokens[block]
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
    return hits, hit_tokens


def _bound(trace: Accesses, following: Ints, budget_bytes: int, worth: Ints) -> int:
    """Return an upper bound on the worth of all hits together. worth: of a hit, [number of blocks]

    Berger, Beckmann and Harchol-Balter 2018 (PFOO-L): a hit occupies its block's bytes since the block's previous
    access. All hits together cannot occupy more than the budget times the length of the trace. So no policy's hits are
    worth more than those that are taken by worth per cost until this is used up, the last one in part.
    """
    reused = (following < len(trace)) & (trace.num_bytes[trace.blocks] <= budget_bytes)
    blocks = trace.blocks[reused]
    costs = (trace.num_bytes[blocks] * (following - np.arange(len(trace)))[reused]).astype(np.float64)
    gains = worth[blocks].astype(np.float64)
    order = np.argsort(costs / np.maximum(gains, 1e-9), kind="stable")
    spent = np.concatenate([[0.0], np.cumsum(costs[order])])
    gained = np.concatenate([[0.0], np.cumsum(gains[order])])
    return int(np.interp(float(budget_bytes) * len(trace), spent, gained) + 1e-6)
