"""Estimates the time of a full prefill from real passes."""

from __future__ import annotations

import threading

import numpy as np

# A shorter pass takes mostly the fixed time of any pass, so it says little about a long pass.
LEAST_TOKENS = 128


class PrefillEstimate:
    """The time that a full prefill would take, learnt from reads that the engine did anyway. Thread-safe.

    Only the fastest read of each length counts (lengths up to the same power of two are alike), because other work at
    the same time can only slow a read. Between known lengths the seconds per token are interpolated. Beyond them they
    are constant, which ignores the attention of a longer prompt, so the estimate is rather too low.

    samples: number of reads that it was learnt from
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fastest: dict[int, tuple[int, float]] = {}  # by power of two: tokens, seconds per token
        self.samples = 0

    def add(self, num_tokens: int, seconds: float, sequences: int = 1) -> None:
        """Learn from a pass over `sequences` sequences of `num_tokens` each. Short passes are ignored."""
        if num_tokens * sequences < LEAST_TOKENS:
            return
        rate = seconds / (num_tokens * sequences)
        with self._lock:
            self.samples += 1
            known = self._fastest.get(num_tokens.bit_length())
            if known is None or rate < known[1]:
                self._fastest[num_tokens.bit_length()] = (num_tokens, rate)

    def seconds(self, num_tokens: int) -> float | None:
        """Return the estimated seconds, or None before the first read."""
        with self._lock:
            points = sorted(self._fastest.values())
        if not points:
            return None
        lengths, rates = zip(*points, strict=True)
        return num_tokens * float(np.interp(num_tokens, lengths, rates))
