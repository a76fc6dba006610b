"""Asks all running peers the same questions, and collects their answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peer_workers.channel import Answer
from benchmarks.peers_processes import PEERS, ROOT, PeerError, PeerProcess
from benchmarks.peers_streams import Question, Streams

REFERENCE = "transformers"
CHECK_TOKENS = 8
OUTSIDE = 10**6  # number of the first passage that no stream holds


@dataclass
class Run:
    """All measurements under a dtype.

    about:   versions and settings by peer
    answers: by cell (a stream of questions), row (a peer and its variant) and number of the question
    together: by cell, row and number of the burst of askers
    read_s:  seconds in which a peer read the pool's passages
    missing: reason why a peer was not run, or not to the end
    same:    by row: first tokens and all tokens of the check prompts that equal transformers', and how many there were
    """

    dtype: str
    about: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, dict[str, dict[int, Answer]]] = field(default_factory=dict)
    together: dict[str, dict[str, dict[int, list[Answer]]]] = field(default_factory=dict)
    read_s: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    same: dict[str, dict[str, int]] = field(default_factory=dict)

    def agrees(self, row: str) -> bool:
        """Return whether a row computes the same as transformers, judged by the check prompts.

        Rounding may change some first tokens in half precision; by chance none would be the same.
        """
        if row not in self.same:
            return True
        found = self.same[row]
        return found["first"] >= (found["prompts"] if self.dtype == "float32" else 1)


class Table:
    """The running peers of a dtype, and their answers.

    answer: tokens of each answer; slow_rounds: rounds of each stream for slow peers
    """

    def __init__(self, run: Run, streams: Streams, answer: int, slow_rounds: int) -> None:
        self.run = run
        self._streams = streams
        self._answer = answer
        self._slow_rounds = slow_rounds
        self._peers: dict[str, PeerProcess] = {}
        self._checked: dict[str, list[list[int]]] = {}

    def start(self, name: str, make: Callable[[], PeerProcess], stack: ExitStack) -> None:
        _say(f"{self.run.dtype}: starting {name}")
        try:
            self._peers[name] = stack.enter_context(make())
        except PeerError as error:
            self._give_up(name, error)
        else:
            self.run.about[name] = self._peers[name].about

    def rows(self, number: int = 0, *, leave_out: Sequence[str] = ()) -> list[tuple[str, str, str]]:
        """Return (row, peer, variant) of the peers that run and take part in the round of this number."""
        due = [name for name in self._peers if number < self._slow_rounds or not PEERS[name].slow]
        every = [(row, name, variant) for name in due for variant, row in PEERS[name].labels().items()]
        return [one for one in every if one[0] not in leave_out]

    def read_pool(self) -> None:
        pool = [self._streams.passage(number) for number in range(self._streams.sizes.pool)]
        for name, peer in list(self._peers.items()):
            try:
                self.run.read_s[name] = peer.read(pool)
            except PeerError as error:
                self._give_up(name, error)

    def warm_up(self) -> None:
        """Run every row once over a passage outside the streams, then the check prompts."""
        outside = Question((OUTSIDE,), tuple(self._streams.passage(OUTSIDE + 1)[: self._streams.sizes.suffix]))
        checks = [Question((OUTSIDE + n,), outside.suffix) for n in range(2, 5)]
        for row, name, variant in self.rows():
            self._ask(row, name, variant, [outside], 2)
            if variant not in ("reposition", "link"):  # these methods differ from full prefill by design
                self._check(row, name, variant, checks)
        theirs = self._checked.get(REFERENCE)
        if theirs is not None:
            self.run.same = {row: _same(ours, theirs) for row, ours in self._checked.items() if row != REFERENCE}

    def ask(self, cell: str, number: int, question: Question, *, leave_out: Sequence[str] = ()) -> None:
        for row, answers in self._in_turn(number, [question], leave_out):
            self.run.answers.setdefault(cell, {}).setdefault(row, {})[number] = answers[0]
        _say(f"{self.run.dtype}: {cell} {number + 1}")

    def ask_together(
        self, cell: str, number: int, questions: Sequence[Question], *, leave_out: Sequence[str] = ()
    ) -> None:
        for row, answers in self._in_turn(number, questions, leave_out):
            self.run.together.setdefault(cell, {}).setdefault(row, {})[number] = answers
        _say(f"{self.run.dtype}: {cell}, askers {number + 1}")

    def _in_turn(
        self, number: int, questions: Sequence[Question], leave_out: Sequence[str]
    ) -> Iterator[tuple[str, list[Answer]]]:
        """Yield each row with its answers, beginning with another row in each round; rows that failed are left out."""
        rows = self.rows(number, leave_out=leave_out)
        first = number % max(1, len(rows))
        for row, name, variant in [*rows[first:], *rows[:first]]:
            if answers := self._ask(row, name, variant, questions, self._answer):
                yield row, answers

    def _check(self, row: str, name: str, variant: str, questions: Sequence[Question]) -> None:
        answers = [self._ask(row, name, variant, [question], CHECK_TOKENS) for question in questions]
        if all(answers):
            self._checked[row] = [answer[0].ids for answer in answers if answer]

    def _ask(
        self, row: str, name: str, variant: str, questions: Sequence[Question], tokens: int
    ) -> list[Answer] | None:
        if name not in self._peers:  # it failed at an earlier variant
            return None
        try:
            return self._peers[name].ask(variant, [self._streams.prompt(one) for one in questions], tokens)
        except PeerError as error:
            self._give_up(name, error)
            return None

    def _give_up(self, name: str, error: PeerError) -> None:
        self._peers.pop(name, None)
        self.run.missing[name] = str(error).replace(str(ROOT), ".")
        _say(f"{self.run.dtype}: {name}: not run, because {self.run.missing[name]}")


def _same(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return how many tokens are equal up to the first difference; after it the inputs differ."""
    pairs = list(zip(ours, theirs, strict=True))
    common = [next((n for n, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x)) for x, y in pairs]
    first = sum(count > 0 for count in common)
    return {"prompts": len(pairs), "first": first, "tokens": sum(len(x) for x, _ in pairs), "common": sum(common)}


def _say(what: str) -> None:
    print(f"peers: {what}", file=sys.stderr, flush=True)
