"""Shares of prefix, moved, changed and new tokens in a log of requests.

A prompt is cut after words that are selected by their hash, so that equal text is cut alike wherever it occurs. A piece
is

    prefix   if an earlier prompt began with the same pieces up to its end
    moved    if an earlier prompt had it elsewhere
    changed  if no earlier prompt had it, and it lies between two pieces that earlier prompts had
    new      otherwise

The last `most` pieces and beginnings are remembered; older pieces count as new.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ragcache_plan.rates import MachineRates
from ragcache_plan.request_logs import Logged

UNIT = re.compile(r"\w+|[^\w\s]")
SHARES = ("prefix", "moved", "changed", "new")
MOST = 1 << 19
"""Number of pieces that are remembered, and of beginnings of prompts."""
CUT_EVERY = 16
"""Mean units of a piece. A piece has at most 8 times as many."""


def pieces_of(request: Logged) -> Iterator[tuple[int, int]]:
    """Yield each piece's hash and number of tokens. A word or sign of a text counts as a token.

    A token id and a block of a trace are a piece each.
    """
    for part in request.parts:
        if not isinstance(part, str):
            yield part if isinstance(part, tuple) else (part, 1)
            continue
        piece: list[str] = []
        for unit in UNIT.finditer(part):
            piece.append(unit[0])
            if _hash(unit[0]) % CUT_EVERY == 0 or len(piece) == 8 * CUT_EVERY:
                yield _hash(" ".join(piece)), len(piece)
                piece = []
        if piece:
            yield _hash(" ".join(piece)), len(piece)


def _hash(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))


class Window:
    """The `most` hashes that were used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._known

    def add(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


@dataclass
class Census:
    """Counts of tokens by share, over all requests, by day and by kind.

    most:    number of pieces, and of beginnings, that are remembered
    skipped: lines of the log that are not requests, by reason
    """

    most: int = MOST
    requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    by_day: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._pieces, self._beginnings = Window(self.most), Window(self.most)

    def add(self, request: Logged) -> None:
        pieces, chain, chains = list(pieces_of(request)), 0, list[int]()
        for key, _ in pieces:
            chain = _hash(f"{chain}:{key}")
            chains.append(chain)
        first = next((rank for rank, one in enumerate(chains) if one not in self._beginnings), len(chains))
        known = [rank < first or key in self._pieces for rank, (key, _) in enumerate(pieces)]
        last = max((rank for rank, one in enumerate(known) if one), default=-1)
        begun = False
        for rank, (_, tokens) in enumerate(pieces):
            begun = begun or known[rank]
            unknown = "changed" if begun and rank < last else "new"
            share = "prefix" if rank < first else "moved" if known[rank] else unknown
            for counts in (self.tokens, self.by_day[request.day], self.by_kind[request.kind]):
                counts[share] += tokens
        self._pieces.add(key for key, _ in pieces)
        self._beginnings.add(chains)
        self.requests += 1

    def to_json(self, rates: MachineRates) -> dict[str, Any]:
        """Return shares in percent, and the seconds of prefill that KV of the found tokens saves at these rates."""
        speed = rates.prefill_tokens_s
        return {
            "requests": self.requests,
            "tokens": sum(self.tokens.values()),
            "shares": shares(self.tokens),
            "by_day": {day: shares(counts) for day, counts in sorted(self.by_day.items())},
            "by_kind": {kind: shares(counts) for kind, counts in sorted(self.by_kind.items())},
            "prefix_saves_s": self.tokens["prefix"] / speed,
            "moved_saves_s": self.tokens["moved"] / speed,
            "remembered": self.most,
            "skipped": dict(self.skipped),
        }


def shares(counts: Counter[str]) -> dict[str, float]:
    total = sum(counts.values())
    return {name: 100 * counts[name] / total if total else 0.0 for name in SHARES}
