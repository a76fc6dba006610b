"""Paired timing: all variants alternate in a run, so that other work of the machine affects all of them alike."""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import quantile_test

if TYPE_CHECKING:
    from benchmarks.journal import Journal

Samples = dict[str, dict[int, float]]

# A hypervisor may give the processors to other machines for a while. A sample that lost a larger share of time than
# this is repeated, up to this many tries, and the sample that lost least counts.
MOST_STOLEN = 0.02
TRIES, LONG_TRIES = 6, 2


@dataclass(frozen=True)
class Variant:
    """A function to time.

    run:     the timed function; its result is freed after the time was taken. If the result is a mapping of names to
             numbers, these are additional samples of the round
    prepare: is called before it, and not timed
    long:    whether it takes seconds, and so is run only in a few of the rounds
    """

    name: str
    run: Callable[[], Any]
    prepare: Callable[[], None] | None = None
    long: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds over the runs of a variant."""

    median_s: float
    min_s: float
    max_s: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@dataclass(frozen=True)
class Ratio:
    """A variant's time over another's, taken within each round that ran both.

    low, high: 95 % interval of the median
    """

    median: float
    min: float
    max: float
    pairs: int
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        return cls(statistics.median(ratios), min(ratios), max(ratios), len(ratios), *median_interval(ratios))


def alternate(
    variants: Sequence[Variant], rounds: int, long_rounds: int, device: torch.device, journal: Journal | None = None
) -> Samples:
    """Return seconds by variant and round, after an untimed round that warms up.

    Every round begins with another variant, so that no variant always runs at the same place. Rounds that the journal
    has are not run again. long_rounds: number of the rounds in which long variants run
    """
    samples: Samples = {variant.name: {} for variant in variants}
    with _quiet_collector():
        _round(variants, device)
        for number in range(rounds):
            due = [v for v in variants if not v.long or _is_long(number, rounds, long_rounds)]
            first, key = number % len(due), f"round {number}"
            found = journal.done.get(key) if journal else None
            if found is None:
                found = _round([*due[first:], *due[:first]], device)
                if journal:
                    journal.add(key, found)
            for name, seconds in found.items():
                samples.setdefault(name, {})[number] = seconds
            print(f"round {number + 1}/{rounds}", file=sys.stderr, flush=True)
    return samples


def summarise(samples: Samples) -> dict[str, Timing]:
    return {name: Timing.of(list(by_round.values())) for name, by_round in samples.items() if by_round}


def ratio(samples: Samples, above: str, below: str) -> Ratio:
    common = samples[above].keys() & samples[below].keys()
    ratios = [samples[above][number] / samples[below][number] for number in common]
    return Ratio.of(ratios)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_long(number: int, rounds: int, long_rounds: int) -> bool:
    """Return whether a round is long: long rounds are spread evenly among all rounds."""
    return (number * long_rounds) % rounds < long_rounds


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Make Python collect no garbage by itself, and ignore the objects that exist already."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _round(variants: Sequence[Variant], device: torch.device) -> dict[str, float]:
    gc.collect()
    return {name: value for variant in variants for name, value in _time(variant, device).items()}


def _time(variant: Variant, device: torch.device) -> dict[str, float]:
    """Return the sample, of several tries, that lost the least share of the processors' time to other machines."""
    best: tuple[float, dict[str, float]] = (math.inf, {})
    for _ in range(LONG_TRIES if variant.long else TRIES):
        best = min(best, _sample(variant, device), key=lambda sample: sample[0])
        if best[0] <= MOST_STOLEN:
            break
    return best[1]


def _sample(variant: Variant, device: torch.device) -> tuple[float, dict[str, float]]:
    """Return the share of all processors' time that was stolen meanwhile, and seconds by name."""
    if variant.prepare is not None:
        variant.prepare()
    synchronise(device)
    theft, started = Theft(), time.perf_counter()
    result = variant.run()
    synchronise(device)
    seconds = time.perf_counter() - started
    share = theft.share()
    further = dict(result) if isinstance(result, Mapping) else {}
    del result
    return share, {variant.name: seconds, **further}


class Theft:
    """The time that the hypervisor gives to other machines from now on."""

    def __init__(self) -> None:
        self._stolen_s, self._started = stolen_s(), time.perf_counter()

    def share(self) -> float:
        """Return the stolen share of all processors' time since this object was made."""
        seconds = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        return (stolen_s() - self._stolen_s) / seconds


def stolen_s() -> float:
    """Return seconds of all processors that the hypervisor gave to other machines; 0 if the kernel hides them."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, between two order statistics (the sign test's), for any distribution.

    Fewer than 6 values do not suffice for it: their whole range is returned then. Raises ValueError without values.
    """
    if not values:
        raise ValueError("there is nothing to take a median of")
    if len(values) < 6:
        return min(values), max(values)
    found = quantile_test(list(values), p=0.5).confidence_interval(0.95)
    return float(found.low), float(found.high)
