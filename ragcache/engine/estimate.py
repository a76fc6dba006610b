"""Estimates of what work takes: a full prefill, by real passes, and an ingestion's KV on disk, by its text."""

from __future__ import annotations

import threading

import numpy as np

# A shorter pass is mostly what any pass costs: it says little of a long one.
LEAST_TOKENS = 128


class PrefillEstimate:
    """Time that a full prefill would take, by reads that the engine did anyway. Thread-safe.

    The fastest read of each length counts (lengths of one power of two are alike): whatever else ran at the same time
    can only have slowed the others. Between the lengths that were read seconds a token are interpolated, beyond them
    they stay what they are, which leaves out the attention of a longer prompt: the estimate is rather too low.

    samples: reads that it was learnt from
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fastest: dict[int, tuple[int, float]] = {}  # by power of two: tokens, seconds a token
        self.samples = 0

    def add(self, num_tokens: int, seconds: float, sequences: int = 1) -> None:
        """One pass over `sequences` of so many tokens each. A pass of few tokens tells nothing."""
        if num_tokens * sequences < LEAST_TOKENS:
            return
        rate = seconds / (num_tokens * sequences)
        with self._lock:
            self.samples += 1
            known = self._fastest.get(num_tokens.bit_length())
            if known is None or rate < known[1]:
                self._fastest[num_tokens.bit_length()] = (num_tokens, rate)

    def seconds(self, num_tokens: int) -> float | None:
        """None until something was read."""
        with self._lock:
            points = sorted(self._fastest.values())
        if not points:
            return None
        lengths, rates = zip(*points, strict=True)
        return num_tokens * float(np.interp(num_tokens, lengths, rates))
