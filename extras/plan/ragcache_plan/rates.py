"""How fast a machine computes and reads, stated or measured, and the cost of a question at these rates."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragcache.errors import ConfigError, translate_os_errors
from ragcache.store.prefill_rate import PrefillRate

if TYPE_CHECKING:
    from ragcache.models.language_model import LanguageModel

# Lengths of the measured prefills, and how often each runs after a warm-up pass.
PROBE_TOKENS, PROBE_REPEATS = (128, 512), 3
# Size of the file that is read, and the time spent on reading it.
PROBE_BYTES, PROBE_S = 16 << 20, 1.0


@dataclass(frozen=True)
class MachineRates:
    """Rates of a machine.

    prefill_tokens_s: tokens that a full prefill reads in a second
    attention_share:  share of a prefill of 1,000 tokens that grows with the square of the length
    memory_bytes_s:   KV placed from host memory in a second
    disk_bytes_s:     KV read from disk in a second
    network_bytes_s:  KV received from a remote store in a second

    The defaults are those of an 8B model on an A100: 5,646 tokens/s from KVLink's 246 GPU hours for a million requests
    of 5,000 tokens, PCIe 4.0, one NVMe disk, a network of 10 Gbit/s. Raises ConfigError naming the option.
    """

    prefill_tokens_s: float = 5646.0
    attention_share: float = 0.0
    memory_bytes_s: float = 24e9
    disk_bytes_s: float = 3e9
    network_bytes_s: float = 1.25e9

    def __post_init__(self) -> None:
        for option, value in (
            ("prefill-rate", self.prefill_tokens_s),
            ("memory-rate", self.memory_bytes_s),
            ("disk-rate", self.disk_bytes_s),
            ("network-rate", self.network_bytes_s),
        ):
            if not 0 < value < float("inf"):
                raise ConfigError(f"--{option} is {value:g}; give a rate above 0")
        if not 0 <= self.attention_share < 1:
            raise ConfigError(f"the attention share is {self.attention_share:g}; give 0 or more, below 1")

    @property
    def prefill(self) -> PrefillRate:
        return PrefillRate.of(self.prefill_tokens_s, self.attention_share)

    def prefill_s(self, num_tokens: float) -> float:
        """Return the seconds in which a prefill of this many tokens runs."""
        return self.prefill.seconds(num_tokens)

    def load_s(self, num_bytes: float, tier: str) -> float:
        """Return the seconds in which this much KV is placed from "memory", "disk" or "remote"."""
        placed = num_bytes / self.memory_bytes_s
        if tier == "memory":
            return placed
        return placed + num_bytes / (self.disk_bytes_s if tier == "disk" else self.network_bytes_s)

    def pays_above(self, num_bytes: float, num_tokens: float) -> float | None:
        """Return the bytes per second of a disk or network above which loading this much KV is faster than computing
        it.

        Returns None if placing it alone takes longer.
        """
        left_s = self.prefill_s(num_tokens) - num_bytes / self.memory_bytes_s
        return num_bytes / left_s if left_s > 0 else None


def measure_rates(lm: LanguageModel, directory: Path) -> MachineRates:
    """Measure this machine: prefills of two lengths, copies in memory, and reads of a file in `directory` past the page
    cache.

    Raises StoreReadOnlyError, StoreFullError.
    """
    from ragcache.engine.probe import probe_memory

    prefill = measure_prefill(lm)
    thousand = prefill.seconds(1000)
    share = min(0.99, prefill.quadratic * 1e6 / thousand)
    return MachineRates(1000 / thousand, share, probe_memory(), _disk_bytes_s(directory))


def measure_prefill(lm: LanguageModel) -> PrefillRate:
    """Return the prefill's rate from passes of two lengths: of each the fastest of three, after a warm-up pass."""
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


def _disk_bytes_s(directory: Path) -> float:
    from ragcache.engine.probe import probe_disk

    with translate_os_errors(directory), tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(os.urandom(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return probe_disk(Path(file.name), PROBE_S)[1]
