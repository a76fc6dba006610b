"""Full prefill: the baseline for every other method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.method import FusionMethod


@dataclass(frozen=True)
class Full(FusionMethod):
    """Reads the prompt in a single causal forward pass, and no blocks.

    If an earlier pass has computed the KV of the prompt's beginning, only the tokens after it run; the logits are the
    same within rounding.

    reuse: whether the KV of a prompt's beginning may be reused; False runs every token, to measure full prefill
    """

    reuse: bool = True

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "baseline"
    summary: ClassVar[str] = "reads the whole prompt"
    reuses_blocks: ClassVar[bool] = False
    joins_states: ClassVar[bool] = True
    keeps_context: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.reuse, bool):
            raise ConfigError(f"reuse is {self.reuse!r}; give true or false")

    @property
    def takes_exact(self) -> bool:  # type: ignore[override]
        return self.reuse

    shares_context = takes_exact
