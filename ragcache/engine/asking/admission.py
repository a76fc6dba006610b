"""How many answers at once: each reserves the memory of its KV before it is read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from ragcache.errors import AnswerTooLargeError
from ragcache.kv.buffers import capacity_for
from ragcache.models.limits import Limit
from ragcache.models.lm import LanguageModel
from ragcache.models.memory import machine_bytes

# Without a figure of the user's: the share of the device's memory that all answers may take together.
DEFAULT_SHARE = 2
UNKNOWN_BYTES = 1 << 62  # where the system does not say how much it has


class Size(NamedTuple):
    """What a question's KV takes at most."""

    num_tokens: int
    num_bytes: int


class Admission:
    """Bytes of KV that all answers in progress may hold together. First come, first served; thread-safe.

    A large request is never starved: whatever comes later waits behind it.

    budget_bytes: never exceeded
    changed:      the lock of all its state, and of what decides about sizes
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._reserved = 0
        self._queue: deque[object] = deque()
        self.changed = threading.Condition()

    @property
    def reserved_bytes(self) -> int:
        return self._reserved

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def reserve(self, size: Callable[[], Size], limit: Limit) -> int:
        """Wait until there is room, and take it until `release`; returns the bytes taken.

        size: what is needed, asked whenever there may be room: it may change while others come and go

        Raises AnswerTooLargeError when it can never fit, and what `limit` raises while it does not fit yet.
        """
        ticket = object()
        with self.changed:
            self._queue.append(ticket)
            try:
                self._check(size())
                while self._queue[0] is not ticket or not self._fits(size()):
                    limit.check()
                    self.changed.wait(limit.poll_s())
                limit.check()
                num_bytes = size().num_bytes
                self._reserved += num_bytes
                return num_bytes
            finally:
                self._queue.remove(ticket)
                self.changed.notify_all()

    def _fits(self, size: Size) -> bool:
        self._check(size)
        return self._reserved + size.num_bytes <= self.budget_bytes

    def _check(self, size: Size) -> None:
        if size.num_bytes > self.budget_bytes:
            raise AnswerTooLargeError(
                f"prompt and answer have up to {size.num_tokens} tokens, whose KV takes {size.num_bytes} bytes, and "
                f"all answers together may take {self.budget_bytes}; ask for a shorter answer (max_tokens) or fewer "
                "passages (k), or raise answer_bytes"
            )

    def release(self, num_bytes: int) -> None:
        with self.changed:
            self._reserved -= num_bytes
            self.changed.notify_all()


def default_budget(lm: LanguageModel) -> int:
    """Half of the memory of the model's device."""
    if lm.device.type == "cuda":
        return int(torch.cuda.mem_get_info(lm.device)[1]) // DEFAULT_SHARE
    found = machine_bytes()
    return UNKNOWN_BYTES if found is None else found // DEFAULT_SHARE


def kv_bytes(lm: LanguageModel, num_tokens: int) -> int:
    """Bytes of a cache with room for `num_tokens` tokens."""
    position_bytes = lm.shape.num_layers * torch.int64.itemsize
    return capacity_for(num_tokens) * (lm.kv_bytes_per_token + position_bytes)
