"""95 % intervals: Wilson's for shares of independent questions, the bootstrap over questions for everything else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959964
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A mean over `size` values, with its 95 % interval."""

    mean: float
    low: float
    high: float
    size: int


def estimate(values: Sequence[float | bool], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Return the mean with its interval.

    values:   booleans take Wilson's interval, numbers the bootstrap's
    clusters: the cluster of each value. Values of a cluster (a question with its gold passage at every position) are
              not independent: whole clusters are drawn then, for booleans too
    Raises ValueError if there are no values.
    """
    if not values:
        raise ValueError("there is nothing to take a mean of")
    repeated = clusters is not None and len(set(clusters)) < len(clusters)
    mean = float(np.mean(np.asarray(values, dtype=np.float64)))
    if all(isinstance(value, bool | np.bool_) for value in values) and not repeated:
        low, high = wilson(sum(map(bool, values)), len(values))
    else:
        low, high = bootstrap(values, clusters if repeated else None)
    return Estimate(mean, low, high, len(values))


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927). Unlike the normal one it keeps its level near 0 and 1."""
    share = right / asked
    middle = share + Z * Z / (2 * asked)
    half = Z * (share * (1 - share) / asked + Z * Z / (4 * asked * asked)) ** 0.5
    scale = 1 + Z * Z / asked
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def bootstrap(values: Sequence[float | bool], clusters: Sequence[Hashable] | None = None) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean over 2,000 resamples of whole clusters.

    It is the same for the same values.
    """
    names = list(range(len(values))) if clusters is None else list(clusters)
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    owner = np.array([places[name] for name in names])
    sums = np.bincount(owner, weights=np.asarray(values, dtype=np.float64))
    counts = np.bincount(owner)
    drawn = np.random.default_rng(0).integers(0, len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
