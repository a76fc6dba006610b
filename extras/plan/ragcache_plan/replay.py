"""Replays a trace against tiers without a model: the stores' own policies over numbers instead of tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragcache.store.eviction import LRU, Entry, EvictionPolicy, get_policy
from ragcache.store.ledger import ByteLedger
from ragcache_plan.accesses import Accesses
from ragcache_plan.rates import MachineRates


class SimulatedTier:
    """The blocks that a tier would hold, by the memory tier's own ledger. budget_bytes: None keeps all blocks"""

    def __init__(self, name: str, budget_bytes: int | None, policy: EvictionPolicy) -> None:
        self.name = name
        self.ledger = ByteLedger(sys.maxsize, LRU()) if budget_bytes is None else ByteLedger(budget_bytes, policy)
        self.hits = self.hit_tokens = self.read_bytes = self.written_bytes = 0

    def get(self, entry: Entry) -> bool:
        self.ledger.touch(entry.key)
        if entry.key not in self.ledger:
            return False
        self.hits += 1
        self.hit_tokens += entry.num_tokens
        self.read_bytes += entry.num_bytes
        return True

    def put(self, entry: Entry) -> None:
        """Add the entry, or replace an entry with its key, if there is room or the policy evicts others for it."""
        self.ledger.remove(entry.key)
        reservation = self.ledger.reserve(entry)
        if reservation is not None:
            self.ledger.settle(reservation)
            self.ledger.add(entry)
            self.written_bytes += entry.num_bytes


@dataclass(frozen=True)
class Budgets:
    """Budgets of the tiers: memory_bytes, and disk_bytes: None keeps every block, as the disk tier does.

    eager: every block is on disk before the first request, as long as they fit; else each is computed when first
    requested
    """

    memory_bytes: int
    disk_bytes: int | None = None
    eager: bool = True


@dataclass(frozen=True, eq=False)
class Replayed:
    """The outcome of a replay. hits, hit_tokens, read_bytes, written_bytes, evictions: by tier; ttft_s: [requests]"""

    accesses: int
    computed: int
    computed_tokens: int
    hits: dict[str, int]
    hit_tokens: dict[str, int]
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    evictions: dict[str, int]
    ttft_s: NDArray[np.float64] = field(repr=False)


def replay(
    trace: Accesses, budgets: Budgets, policy: str, admission: str, rates: MachineRates, question_tokens: int = 30
) -> Replayed:
    """Replay requests one after another, as a store serves them.

    A request does all its lookups, each promoting the blocks found to the faster tier, and then adds the blocks that no
    tier had, to the durable tier first.
    """
    entries = [
        Entry(str(number), num_bytes, num_tokens)
        for number, (num_bytes, num_tokens) in enumerate(
            zip(trace.num_bytes.tolist(), trace.num_tokens.tolist(), strict=True)
        )
    ]
    count = len(entries)
    memory = SimulatedTier("memory", budgets.memory_bytes, get_policy(policy, admission, count))
    disk = SimulatedTier("disk", budgets.disk_bytes, get_policy(policy, admission, count))
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
        hit_tokens={tier.name: tier.hit_tokens for tier in tiers},
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
    """Return each request's seconds to the first token, and the numbers of blocks and tokens that were computed."""
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
