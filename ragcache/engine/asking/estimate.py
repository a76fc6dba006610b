"""How long a prefill takes here: measured by passes of two lengths, or learnt from the passes of real questions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from ragcache.models.language_model import LanguageModel
from ragcache.store.eviction import PrefillRate

PROBE_TOKENS = (128, 512)
PROBE_REPEATS = 3
# A shorter pass is mostly what any pass costs: it says little of a long one.
LEAST_TOKENS = 128


class PrefillEstimate:
    """Time that a full prefill would take, by reads that the engine did anyway. Thread-safe.

    The fastest read of each length counts (lengths of one power of two are alike): whatever else ran at the same time
    can only have slowed the others. Between the lengths that were read seconds a token are interpolated, beyond them
    they stay what they are, which leaves out the attention of a longer prompt: the estimate is rather too low.

    samples: reads that it was learnt from
    """

    def __init__(self, measure: Callable[[], PrefillRate] | None = None) -> None:
        """measure: tells what to expect before anything was read; called once at most"""
        self._lock, self._measuring = threading.Lock(), threading.Lock()
        self._measure = measure
        self._measured: PrefillRate | None = None
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

    def expected_s(self, num_tokens: int) -> float:
        """`seconds`, or by a measurement where nothing was read yet; 0.0 where there is none."""
        if (known := self.seconds(num_tokens)) is not None:
            return known
        with self._measuring:  # two at once would slow each other
            if self._measured is None and self._measure is not None:
                self._measured = self._measure()
        return 0.0 if self._measured is None else self._measured.seconds(num_tokens)


def measure_prefill(lm: LanguageModel) -> PrefillRate:
    """Two lengths fix the two coefficients; of each the fastest of three passes counts, after one to warm up."""
    few, many = (min(tokens, lm.max_positions // divisor) for tokens, divisor in zip(PROBE_TOKENS, (4, 1), strict=True))
    seconds = {tokens: min([_pass_s(lm, tokens) for _ in range(1 + PROBE_REPEATS)][1:]) for tokens in (few, many)}
    quadratic = (seconds[many] / many - seconds[few] / few) / (many - few) if many > few else 0.0
    quadratic = max(0.0, quadratic)
    return PrefillRate(max(0.0, seconds[many] / many - quadratic * many), quadratic)


def _pass_s(lm: LanguageModel, num_tokens: int) -> float:
    cache = lm.new_cache(num_tokens)
    started = time.perf_counter()
    lm.run([1 + rank % 100 for rank in range(num_tokens)], 0, cache)
    taken = time.perf_counter() - started
    cache.release()
    return taken
