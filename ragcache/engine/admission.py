"""Limits concurrent answers: each reserves the memory of its KV before its prompt is read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ragcache.errors import AnswerTooLargeError
from ragcache.kv.buffers import LARGEST_STEP, capacity_for
from ragcache.models.deadline import Limit
from ragcache.models.language_model import LanguageModel
from ragcache.models.machine import machine_bytes

# Divisor of the device's memory that all answers may take together by default.
DEFAULT_SHARE = 2
UNKNOWN_BYTES = 1 << 62  # of an engine that keeps its own memory


class Size(NamedTuple):
    """The memory that a question's KV takes.

    num_tokens: of the prompt, and of the answer or its beginning, for the message of AnswerTooLargeError
    num_bytes:  for its prompt, and for its answer or the answer's beginning
    more_bytes: the most that a long answer may request later
    """

    num_tokens: int
    num_bytes: int
    more_bytes: int = 0


@dataclass(eq=False)
class Claim:
    """The memory of an answer.

    num_bytes:   taken at first
    more_bytes:  the most that it may still request
    grown_bytes: requested since; certainly free when the answer ends
    """

    num_bytes: int
    more_bytes: int
    grown_bytes: int = 0


@dataclass(eq=False, repr=False)
class Admission:
    """Bytes of KV that all answers in progress may hold together. First come, first served; thread-safe.

    A large request is never starved, because later requests wait until it is admitted. An answer without a length limit
    takes memory as it grows, with priority over requests that wait to begin. All answers can always end, one after
    another if necessary (the banker's algorithm, Dijkstra 1965): a request that would break this waits.

    budget_bytes: never exceeded
    changed:      condition that is notified when memory is freed; its lock protects all state, and is held while sizes
                  are decided
    """

    budget_bytes: int

    def __post_init__(self) -> None:
        self.reserved_bytes = self._growing = 0
        self._queue: deque[object] = deque()
        self._claims: set[Claim] = set()
        self.changed = threading.Condition()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def reserve(self, size: Callable[[], Size], limit: Limit) -> Claim:
        """Wait until there is room for a question's KV, and reserve it until `end` and `release` return it.

        size: returns the question's need; called again whenever there may be room, because the need changes when other
              questions over the same context come and go

        Returns the claim, for `grow` and `end`. Raises AnswerTooLargeError if the need exceeds the whole budget, and
        the errors of `limit` while it waits.
        """
        ticket = object()
        with self.changed:
            self._queue.append(ticket)
            try:
                self._check(size())
                while self._growing or self._queue[0] is not ticket or not self._fits(size()):
                    limit.check()
                    self.changed.wait(limit.poll_s())
                limit.check()
                claim = Claim(size().num_bytes, size().more_bytes)
                self.reserved_bytes += claim.num_bytes
                self._claims.add(claim)
                return claim
            finally:
                self._queue.remove(ticket)
                self.changed.notify_all()

    def _fits(self, size: Size) -> bool:
        self._check(size)
        return self._can_end(size.num_bytes, [*self._claims, Claim(size.num_bytes, size.more_bytes)])

    def grow(self, claim: Claim, num_bytes: int, limit: Limit) -> None:
        """Wait for `num_bytes` more memory, at most what the claim announced.

        Raises the errors of `limit` while it waits.
        """
        grown = Claim(0, claim.more_bytes - num_bytes, claim.grown_bytes + num_bytes)
        with self.changed:
            self._growing += 1
            try:
                while not self._can_end(num_bytes, [*(self._claims - {claim}), grown]):
                    limit.check()
                    self.changed.wait(limit.poll_s())
                self.reserved_bytes += num_bytes
                claim.more_bytes, claim.grown_bytes = grown.more_bytes, grown.grown_bytes
            finally:
                self._growing -= 1
                self.changed.notify_all()

    def _can_end(self, num_bytes: int, claims: Sequence[Claim]) -> bool:
        """Return whether there is room for `num_bytes`, and then for every claim, one after another.

        The memory that an answer took at first is not counted as freed: it may stay in a context that others read.
        """
        free = self.budget_bytes - self.reserved_bytes - num_bytes
        if free < 0:
            return False
        for claim in sorted(claims, key=lambda claim: claim.more_bytes):
            if claim.more_bytes > free:
                return False
            free += claim.grown_bytes
        return True

    def end(self, claim: Claim) -> None:
        """Return the memory that an answer requested as it grew; the caller calls `release` for its first memory."""
        with self.changed:
            self._claims.discard(claim)
            self.release(claim.grown_bytes)

    def _check(self, size: Size) -> None:
        if size.num_bytes + size.more_bytes > self.budget_bytes:
            raise AnswerTooLargeError(
                f"prompt and answer have up to {size.num_tokens} tokens, whose KV takes {size.num_bytes} bytes, and "
                f"all answers together may take {self.budget_bytes}; ask for a shorter answer (max_tokens) or fewer "
                "passages (k), or raise answer_bytes"
            )

    def release(self, num_bytes: int) -> None:
        with self.changed:
            self.reserved_bytes -= num_bytes
            self.changed.notify_all()


def default_budget(lm: LanguageModel) -> int:
    """Return half of the memory of the model's device."""
    if lm.device.type == "cuda":
        return int(torch.cuda.mem_get_info(lm.device)[1]) // DEFAULT_SHARE
    return machine_bytes() // DEFAULT_SHARE


def tokens_within(lm: LanguageModel, num_bytes: int) -> int:
    """Return a number of tokens whose cache certainly fits into `num_bytes`."""
    states = 2 * lm.shape.state_bytes
    return max(0, (num_bytes - states) // (kv_bytes(lm, 1) - states) * capacity_for(1) - LARGEST_STEP)


def kv_bytes(lm: LanguageModel, num_tokens: int) -> int:
    """Return the bytes of a cache with room for `num_tokens` tokens."""
    position_bytes = lm.shape.num_layers * torch.int64.itemsize
    states = 2 * lm.shape.state_bytes  # recurrent layers keep the states after the placed context, and the last states
    return capacity_for(num_tokens) * (lm.kv_bytes_per_token + position_bytes) + states
