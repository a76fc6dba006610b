"""The requests that a plan serves and the prices that it pays, as options of `ragcache plan`.

`ragcache --help` loads this module, so it imports nothing heavy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from ragcache.cli.terminal import option
from ragcache.errors import ConfigError, check_least

GB = 1e9


@dataclass(frozen=True)
class Demand:
    """Requests to serve, and how. Each field's help text describes it. Raises ConfigError naming the option."""

    requests: Annotated[int, option("--requests", "Requests a month.")] = 100_000
    request_tokens: Annotated[int, option("--request-tokens", "Tokens of a whole prompt, passages and question.")] = (
        1310
    )
    question_tokens: Annotated[int, option("--question-tokens", "Of them, those that are always run.")] = 30
    zipf: Annotated[float, option("--zipf", "Exponent of the passages' popularity; 0: all are read alike.")] = 0.8
    tier: Annotated[
        Literal["memory", "disk", "remote"], option("--tier", "Where a request's KV comes from, for the estimate.")
    ] = "disk"
    replicas: Annotated[
        int, option("--replicas", "Machines that answer, each with a memory and a disk; a remote store is shared.")
    ] = 1
    fused_s: Annotated[
        float | None, option("--fused-s", "Seconds to the first token with stored KV, in place of the estimate.")
    ] = None

    def __post_init__(self) -> None:
        check_least("--requests", self.requests, 1)
        check_least("--request-tokens", self.request_tokens, 1)
        check_least("--replicas", self.replicas, 1)
        if not 0 <= self.question_tokens < self.request_tokens:
            raise ConfigError(
                f"--question-tokens is {self.question_tokens}; give 0 or more, below --request-tokens "
                f"{self.request_tokens}"
            )
        if self.fused_s is not None:
            _above_zero("fused-s", self.fused_s)
        if not 0 <= self.zipf <= 10:
            raise ConfigError(f"--zipf is {self.zipf:g}; give an exponent from 0 (all alike) to 10")

    @property
    def context_tokens(self) -> int:
        return self.request_tokens - self.question_tokens

    @property
    def copies(self) -> int:
        """Return how many copies of a chunk are stored."""
        return 1 if self.tier == "remote" else self.replicas


@dataclass(frozen=True)
class Prices:
    """Prices in a single currency.

    The defaults are those of KVLink's authors: an A100 at 1.79 USD an hour, object storage at 0.023 USD. Reading from
    object storage costs nothing within its region. Raises ConfigError naming the option.
    """

    gpu_hour: Annotated[float, option("--gpu-hour", "Price of a GPU hour.")] = 1.79
    gb_month: Annotated[float, option("--gb-month", "Price of 10^9 bytes for a month.")] = 0.023
    months: Annotated[float, option("--months", "Months for which precomputed KV is kept.")] = 12.0
    gb_transfer: Annotated[float, option("--gb-transfer", "Price of reading 10^9 bytes from a remote store.")] = 0.0

    def __post_init__(self) -> None:
        prices = (("gpu-hour", self.gpu_hour), ("gb-month", self.gb_month), ("gb-transfer", self.gb_transfer))
        for name, value in prices:
            if not 0 <= value < math.inf:
                raise ConfigError(f"--{name} is {value:g}; give a price, 0 or more")
        _above_zero("months", self.months)

    def gpu(self, seconds: float) -> float:
        return seconds / 3600 * self.gpu_hour

    def storage(self, num_bytes: float) -> float:
        """Return the price of storing this many bytes for a month."""
        return num_bytes / GB * self.gb_month

    def transfer(self, num_bytes: float, tier: str) -> float:
        return num_bytes / GB * self.gb_transfer if tier == "remote" else 0.0


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"--{name} is {value:g}; give a number above 0")
