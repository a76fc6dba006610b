"""How fast this machine reads and computes blocks: measured at the start, corrected by every read and computation.

A question chooses by these rates between loading a block and computing it (`ragcache.engine.load_plan`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ragcache.errors import StoreError
from ragcache.files import atomic_write, write_all
from ragcache.kv.block_key import digest
from ragcache.lazy_torch import torch
from ragcache.store.prefill_rate import PrefillRate

if TYPE_CHECKING:
    from ragcache.models.language_model import LanguageModel

log = logging.getLogger(__name__)
Clock = Callable[[], float]
AUTO, ALWAYS, NEVER = "auto", "always", "never"
LOADS = (AUTO, ALWAYS, NEVER)

# Weight of a new measurement (in logarithms: rates differ by powers of ten).
WEIGHT = 0.4
# A measurement that differs by more than this factor is an outlier. A second outlier on the same side is believed.
OUTLIER = 3.0
# Guesses until something is measured: a solid-state disk, and a small model on a few cores.
ASSUMED_LATENCY_S = 0.0005
ASSUMED_BYTES_S = 500e6
ASSUMED_TOKENS_S = 500.0
# A smaller delay does not count as late: on a busy machine threads wait this long.
GRACE_S = 0.25
# Figures that differ by less than this factor are not written to the file.
CHANGED = 1.5


@dataclass
class Smoothed:
    """An exponentially weighted average of positive measurements; a single outlier counts little.

    value: the estimate, or the guess it begins with; samples: measurements so far
    """

    value: float
    samples: int = 0
    _outlier: int = 0  # the side of the last measurement if it was an outlier, else 0

    def add(self, measured: float) -> None:
        """Add a measurement; the first replaces the guess."""
        measured = max(measured, 1e-15)
        self.samples += 1
        if self.samples == 1:
            self.value = measured
            return
        step = math.log(measured / self.value)
        side = 0 if abs(step) <= math.log(OUTLIER) else int(math.copysign(1, step))
        if side and side == self._outlier:
            self.value = measured
        else:
            self.value *= math.exp(WEIGHT * max(-math.log(OUTLIER), min(math.log(OUTLIER), step)))
        self._outlier = side

    def restore(self, value: float) -> None:
        """Continue from a measurement of an earlier process."""
        self.value = value
        self.samples = max(self.samples, 1)


class TierFigures(NamedTuple):
    """How fast a tier is read: seconds per read, whatever its size, and throughput of all reads together."""

    latency_s: float
    bytes_s: float


@dataclass
class _Burst:
    """Reads that overlapped, which are measured together: the tier moved all their bytes since the burst began.

    since:     when the burst began, on the clock of `TierRate`
    depth:     the most reads in progress at a time
    files:     reads that have ended
    num_bytes: bytes that these have moved
    """

    since: float
    depth: int = 0
    files: int = 0
    num_bytes: int = 0


class TierRate:
    """Time of reads from a tier, of all threads together: they share the device. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._latency_s = Smoothed(ASSUMED_LATENCY_S)
        self._s_per_byte = Smoothed(1 / ASSUMED_BYTES_S)
        self._reading: dict[int, int] = {}  # number of the read -> bytes
        self._next = 0
        self._heard_at = -math.inf  # when a read last ended, or the first of a burst began
        self._burst: _Burst | None = None

    @property
    def is_measured(self) -> bool:
        return bool(self._latency_s.samples or self._s_per_byte.samples)

    @property
    def figures(self) -> TierFigures:
        return TierFigures(self._latency_s.value, 1 / self._s_per_byte.value)

    def load_s(self, num_bytes: int) -> float:
        """Return the seconds that another read adds to those in progress."""
        return self._latency_s.value + num_bytes * self._s_per_byte.value

    def backlog_s(self) -> float:
        """Return the seconds until the reads in progress, of all questions, have arrived.

        A late read is expected to take as long again.
        """
        with self._lock:
            if not self._reading:
                return 0.0
            waited_s = self._clock() - self._heard_at
            expected_s = sum(self.load_s(size) for size in self._reading.values())
        return waited_s if waited_s > max(expected_s, GRACE_S) else max(0.0, expected_s - waited_s)

    def begin(self, num_bytes: int) -> int:
        """Record that a read begins; return its number for `end`."""
        with self._lock:
            now = self._clock()
            if not self._reading:
                self._heard_at = now
            if self._burst is None:
                self._burst = _Burst(now)
            self._next += 1
            self._reading[self._next] = num_bytes
            self._burst.depth = max(self._burst.depth, len(self._reading))
            return self._next

    def end(self, number: int, *, moved: bool) -> None:
        """Record that a read ended. moved: whether the tier provided the block; if not, the read is not measured"""
        with self._lock:
            size, burst = self._reading.pop(number), self._burst
            if burst is None:
                return
            if moved:
                self._heard_at = self._clock()
                burst.files += 1
                burst.num_bytes += size
            if self._reading and burst.files < burst.depth:
                return
            if burst.files:
                self._learn(burst, self._clock() - burst.since)
            self._burst = _Burst(self._clock(), len(self._reading)) if self._reading else None

    def _learn(self, burst: _Burst, seconds: float) -> None:
        """Learn the latency from small reads, and the rate from large reads."""
        latency_s, transfer_s = burst.files * self._latency_s.value, burst.num_bytes * self._s_per_byte.value
        # Attribute at least a tenth to each, so that an estimate that is too high can fall.
        if latency_s > transfer_s:
            self._latency_s.add(max(seconds - transfer_s, seconds / 10) / burst.files)
        elif burst.num_bytes:
            self._s_per_byte.add(max(seconds - latency_s, seconds / 10) / burst.num_bytes)

    def set(self, latency_s: float, bytes_s: float) -> None:
        """Set the figures to those of a probe, or of an earlier process."""
        with self._lock:
            self._latency_s.restore(latency_s)
            self._s_per_byte.restore(1 / bytes_s)


class ComputeRate:
    """Time that the encoder takes for a batch, by its padded tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._s_per_token: Smoothed | None = None

    def seconds(self, lengths: Sequence[int]) -> float:
        """Return the seconds for a batch of chunks of these lengths, in tokens, padded to the longest."""
        rate = self.prefill or PrefillRate.of(ASSUMED_TOKENS_S)
        return len(lengths) * rate.seconds(max(lengths, default=0))

    def set(self, prefill: PrefillRate) -> None:
        """Set the rate to that of a probe, or of an earlier process; the first batch replaces it."""
        with self._lock:
            self._s_per_token = Smoothed(prefill.linear)

    def add(self, lengths: Sequence[int], seconds: float) -> None:
        """Learn from a batch of chunks. lengths: their tokens; seconds: how long the batch took"""
        measured = max(seconds, 1e-9) / max(1, len(lengths) * max(lengths))
        with self._lock:
            if self._s_per_token is None:
                self._s_per_token = Smoothed(measured)
            else:
                self._s_per_token.add(measured)

    @property
    def prefill(self) -> PrefillRate | None:
        """Return the prefill rate, or None before the first measurement."""
        with self._lock:
            return None if self._s_per_token is None else PrefillRate(self._s_per_token.value, 0.0)


@dataclass(frozen=True)
class RateFigures:
    """The measured rates of a machine and a model, with the small JSON file beside a store that keeps them for the next
    process. They are a statistic: figures that cannot be read or written are measured again.

    tiers:            by name
    prefill:          seconds of encoding n tokens: linear * n + quadratic * n * n; None until measured
    decode_bytes_s:   by codec, bytes of decoded KV put in place per second, on a single thread
    """

    tiers: Mapping[str, TierFigures] = field(default_factory=dict)
    prefill: PrefillRate | None = None
    decode_bytes_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        return bool(self.tiers) or self.prefill is not None

    @property
    def prefill_tokens_s(self) -> float | None:
        """Return the prefill throughput in tokens/s, for 256-token chunks."""
        seconds = 0.0 if self.prefill is None else self.prefill.seconds(256)
        return 256 / seconds if seconds else None

    def to_json(self) -> dict[str, Any]:
        return {
            "tiers": {name: tier._asdict() for name, tier in self.tiers.items()},
            "prefill": None if self.prefill is None else asdict(self.prefill),
            "prefill_tokens_s": self.prefill_tokens_s,
            "decode_bytes_s": dict(self.decode_bytes_s),
        }

    @classmethod
    def read(cls, path: Path, machine: str | None = None) -> Self | None:
        """Read the figures of `machine` (None: of any machine) from a file; return None if it has no such figures."""
        try:
            found = json.loads(path.read_bytes())
            if machine is not None and found["machine"] != machine:
                return None
            rates, prefill = found["rates"], found["rates"]["prefill"]
            return cls(
                {
                    str(name): TierFigures(_positive(tier["latency_s"] or 1e-9), _positive(tier["bytes_s"]))
                    for name, tier in rates["tiers"].items()
                },
                None
                if prefill is None
                else PrefillRate(_positive(prefill["linear"]), max(0.0, float(prefill["quadratic"]))),
                {str(name): _positive(rate) for name, rate in rates["decode_bytes_s"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, path: Path, machine: str) -> None:
        """Write the figures if they differ from those in the file."""
        if self._is_like(self.read(path, machine)):
            return
        try:
            with atomic_write(path) as file:
                write_all(file, json.dumps({"machine": machine, "rates": self.to_json()}).encode())
        except (OSError, StoreError) as error:
            log.warning("%s: measured rates are not kept (%s)", path, error)

    def _is_like(self, old: RateFigures | None) -> bool:
        if (
            old is None
            or old.tiers.keys() != self.tiers.keys()
            or old.decode_bytes_s.keys() != self.decode_bytes_s.keys()
        ):
            return False
        pairs = [(old.tiers[name].bytes_s, tier.bytes_s) for name, tier in self.tiers.items()]
        pairs.append((old.prefill_tokens_s or 1.0, self.prefill_tokens_s or 1.0))
        return all(1 / CHANGED < a / b < CHANGED for a, b in pairs)


def machine_key(lm: LanguageModel) -> str:
    """Return a key for everything that rates depend on: machine, number of threads, model and device."""
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads()]
    return digest([*machine, lm.fingerprint, str(lm.device)])


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{number} is no rate")
    return number


class Rates:
    """Estimated rates for a store and a model. Thread-safe.

    compute: the rate of the model's batches
    decode_bytes_s: as in `RateFigures`
    clock: returns the time in seconds; replaced in tests
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.compute = ComputeRate()
        self.decode_bytes_s: dict[str, float] = {}
        self._tiers: dict[str, TierRate] = {}

    def tier(self, name: str) -> TierRate:
        found = self._tiers.get(name)
        return self._tiers.setdefault(name, TierRate(self.clock)) if found is None else found

    def figures(self) -> RateFigures:
        """Return the rates measured so far, without guesses."""
        tiers = {name: tier.figures for name, tier in self._tiers.copy().items() if tier.is_measured}
        return RateFigures(tiers, self.compute.prefill, self.decode_bytes_s.copy())

    def restore(self, figures: RateFigures) -> None:
        """Continue from earlier measurements."""
        for name, tier in figures.tiers.items():
            self.tier(name).set(tier.latency_s, tier.bytes_s)
        if figures.prefill is not None:
            self.compute.set(figures.prefill)
        self.decode_bytes_s.update(figures.decode_bytes_s)
