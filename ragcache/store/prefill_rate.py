"""The cost of a prefill by its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class PrefillRate:
    """The cost of a prefill of n tokens: linear * n (matrix products) + quadratic * n * n (attention).

    In seconds if the rates were measured; in any unit if costs are only compared.
    """

    linear: float
    quadratic: float

    @classmethod
    def of(cls, tokens_s: float, attention_share: float = 0.0) -> Self:
        """Return the rate of a machine that prefills 1,000 tokens at `tokens_s` tokens per second.

        attention_share: the share of that time that grows with the square of the length
        """
        return cls((1 - attention_share) / tokens_s, attention_share / tokens_s / 1000)

    def seconds(self, num_tokens: float) -> float:
        return self.linear * num_tokens + self.quadratic * num_tokens * num_tokens
