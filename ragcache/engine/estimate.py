"""How long a full prefill would take here: what a fused one is compared with, without running it every time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ragcache.models.lm import LanguageModel

PROBE_TOKENS = (128, 512)


@dataclass(frozen=True)
class PrefillRate:
    """Seconds of a prefill of n tokens: linear * n (matrix products) + quadratic * n * n (attention)."""

    linear: float
    quadratic: float

    def seconds(self, num_tokens: int) -> float:
        return self.linear * num_tokens + self.quadratic * num_tokens * num_tokens


def measure_prefill(lm: LanguageModel) -> PrefillRate:
    """Two lengths fix the two coefficients; each is read twice, and the first reading (warm-up) forgotten."""
    few, many = (min(tokens, lm.max_positions // divisor) for tokens, divisor in zip(PROBE_TOKENS, (4, 1), strict=True))
    seconds = {}
    for tokens in (few, many):
        for _ in range(2):
            cache = lm.new_cache(tokens)
            started = time.perf_counter()
            lm.run([1 + rank % 100 for rank in range(tokens)], 0, cache)
            seconds[tokens] = time.perf_counter() - started
            cache.release()
    quadratic = (seconds[many] / many - seconds[few] / few) / (many - few) if many > few else 0.0
    quadratic = max(0.0, quadratic)
    return PrefillRate(max(0.0, seconds[many] / many - quadratic * many), quadratic)
