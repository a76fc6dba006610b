"""Memory, disk and cards that a log of requests takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragcache_plan.accesses import from_requests
from ragcache_plan.logs import LoggedRequest
from ragcache_plan.rates import MachineRates
from ragcache_plan.replay import Budgets, replay

HOUR_S = 3600.0
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
ENOUGH = 0.95  # share of the tokens found by unlimited memory that the advised memory finds


@dataclass(frozen=True)
class MemorySize:
    """A memory of this many tokens of KV.

    token_rate:    share of the passages' tokens that it finds
    computed_rate: share of all prompt tokens that the model then reads
    cards:         cards that the prefills of the busiest hour take; decoding is not counted
    """

    tokens: int
    num_bytes: int
    token_rate: float
    computed_rate: float
    cards: int


@dataclass(frozen=True)
class Sizing:
    """Memory, disk and cards that a log of requests takes.

    span_s:        seconds from the first request to the last
    disk_tokens, disk_bytes: of every passage once
    memory:        the smallest of `sizes` that finds nearly as much as unlimited memory
    cards_without: cards that the prefills of the busiest hour take without stored KV
    """

    requests: int
    span_s: float
    passages: int
    prompt_tokens: int
    passage_tokens: int
    disk_tokens: int
    disk_bytes: int
    sizes: Sequence[MemorySize]
    memory: MemorySize
    cards_without: int

    @property
    def mean_rest(self) -> int:
        """Return the tokens of a request outside its passages, on average."""
        return (self.prompt_tokens - self.passage_tokens) // self.requests


def size_up(requests: Sequence[LoggedRequest], bytes_per_token: int, rates: MachineRates) -> Sizing:
    """Return the sizes that a log takes, with the default policy and a store that is empty at first."""
    trace = from_requests(requests, bytes_per_token)
    prompts = np.array([request.num_tokens for request in requests])
    inside = np.add.reduceat(
        np.append(trace.num_tokens[trace.blocks], 0), trace.starts[:-1]
    ) * (np.diff(trace.starts) > 0)  # fmt: skip
    hours = np.array([int((request.at - requests[0].at) / HOUR_S) for request in requests])
    rest_s = np.array([rates.prefill_s(tokens) for tokens in (prompts - inside).tolist()])
    disk_tokens, total = int(trace.num_tokens.sum()), int(prompts.sum())
    sizes = []
    for share in SHARES:
        tokens = math.ceil(disk_tokens * share)
        done = replay(trace, Budgets(tokens * bytes_per_token, 0, eager=False), "hyperbolic", "all", rates, 0)
        found = done.hit_tokens["memory"]
        sizes.append(
            MemorySize(
                tokens,
                tokens * bytes_per_token,
                found / max(1, trace.total_tokens),
                (total - found) / total,
                _cards(hours, done.ttft_s + rest_s),
            )
        )
    enough = next(size for size in sizes if size.token_rate >= ENOUGH * sizes[-1].token_rate)
    return Sizing(
        requests=len(requests),
        span_s=requests[-1].at - requests[0].at,
        passages=len(trace.num_tokens),
        prompt_tokens=total,
        passage_tokens=trace.total_tokens,
        disk_tokens=disk_tokens,
        disk_bytes=disk_tokens * bytes_per_token,
        sizes=sizes,
        memory=enough,
        cards_without=_cards(hours, np.array([rates.prefill_s(tokens) for tokens in prompts.tolist()])),
    )


def _cards(hours: np.ndarray, seconds: np.ndarray) -> int:
    return max(1, math.ceil(float(np.bincount(hours, seconds).max()) / HOUR_S))
