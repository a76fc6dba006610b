"""How many answers at once: each reserves the memory of its KV before it is read."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ragcache.errors import AnswerTooLargeError
from ragcache.kv.buffers import capacity_for
from ragcache.models.limits import Limit
from ragcache.models.lm import LanguageModel

# Without a figure of the user's: the share of the device's memory that all answers may take together.
DEFAULT_SHARE = 2
UNKNOWN_BYTES = 1 << 62  # where the system does not say how much it has


class Admission:
    """Bytes of KV that all answers in progress may hold together. First come, first served; thread-safe.

    Who does not fit waits, and whoever comes later waits behind: a large answer is not overtaken for ever.

    budget_bytes: never exceeded
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._reserved = 0
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def reserved_bytes(self) -> int:
        return self._reserved

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextmanager
    def hold(self, num_bytes: int, num_tokens: int, limit: Limit) -> Iterator[None]:
        """Within, so many bytes are reserved; `num_tokens`, of prompt and answer, are for the message.

        Raises AnswerTooLargeError when they can never fit, and what `limit` raises while they do not fit yet.
        """
        if num_bytes > self.budget_bytes:
            raise AnswerTooLargeError(
                f"prompt and answer have up to {num_tokens} tokens, whose KV takes {num_bytes} bytes, and all answers "
                f"together may take {self.budget_bytes}; ask for a shorter answer (max_tokens) or fewer passages (k), "
                "or raise answer_bytes"
            )
        self._reserve(num_bytes, limit)
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= num_bytes
                self._changed.notify_all()

    def _reserve(self, num_bytes: int, limit: Limit) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket or self._reserved + num_bytes > self.budget_bytes:
                    limit.check()
                    self._changed.wait(limit.poll_s())
                limit.check()
                self._reserved += num_bytes
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()


def default_budget(lm: LanguageModel) -> int:
    """Half of the memory of the model's device."""
    if lm.device.type == "cuda":
        return int(torch.cuda.mem_get_info(lm.device)[1]) // DEFAULT_SHARE
    if not hasattr(os, "sysconf"):
        return UNKNOWN_BYTES
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // DEFAULT_SHARE


def kv_bytes(lm: LanguageModel, num_tokens: int) -> int:
    """Bytes of a cache with room for `num_tokens` tokens."""
    position_bytes = lm.shape.num_layers * torch.int64.itemsize
    return capacity_for(num_tokens) * (lm.kv_bytes_per_token + position_bytes)
