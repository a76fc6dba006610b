"""How the cost of a prefill grows with its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class PrefillRate:
    """Cost of a prefill of n tokens: linear * n (matrix products) + quadratic * n * n (attention).

    In seconds where rates were measured; where costs are only compared, the unit is free.
    """

    linear: float
    quadratic: float

    @classmethod
    def of(cls, tokens_s: float, attention_share: float = 0.0) -> Self:
        """Make a rate from tokens per second, of which a share at 1,000 tokens grows with the square of the length."""
        return cls((1 - attention_share) / tokens_s, attention_share / tokens_s / 1000)

    def seconds(self, num_tokens: float) -> float:
        return self.linear * num_tokens + self.quadratic * num_tokens * num_tokens

    def scaled(self, factor: float) -> Self:
        """The rate of a machine that takes `factor` times as long."""
        return type(self)(self.linear * factor, self.quadratic * factor)
