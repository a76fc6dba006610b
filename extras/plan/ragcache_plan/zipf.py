"""Zipf's law: requests for the chunk of rank r are proportional to r ** -exponent."""

from __future__ import annotations

import numpy as np

EXACT = 1 << 20


def zipf_mass(exponent: float, ranks: float) -> float:
    """Return the sum of r ** -exponent for r = 1 ... ranks.

    Beyond a million it is computed as an integral, with the correction of the trapezium rule.
    """
    whole = int(ranks)
    head = min(whole, EXACT)
    total = float(np.sum(np.arange(1, head + 1, dtype=np.float64) ** -exponent))
    if whole <= EXACT:
        return total
    low, high = float(EXACT), float(whole)
    if exponent == 1:
        tail = float(np.log(high / low))
    else:
        tail = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
    return total + tail + float(high**-exponent - low**-exponent) / 2


def ranks_above(exponent: float, ranks: int, least: float, uses: float) -> int:
    """Return how many chunks are requested at least `least` times, if all together are requested `uses` times."""
    if least <= 0:
        return ranks
    first = uses / zipf_mass(exponent, ranks)  # uses of the chunk of rank 1
    if first < least:
        return 0
    if exponent == 0:
        return ranks
    # A whole number that rounding made slightly smaller must not lose a rank to `int`.
    reached = np.exp(min(np.log(first / least) / exponent, np.log(ranks) + 1))
    return min(ranks, int(reached * (1 + 1e-12)))
