"""EPIC's LegoLink: the first tokens of each chunk run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragcache.errors import ConfigError
from ragcache.fusion.recompute import Context, RecomputeMethod


@dataclass(frozen=True)
class Epic(RecomputeMethod):
    """LegoLink (EPIC, section 4): a chunk that was read alone takes its first tokens for attention sinks; running them
    again behind what really stands before them takes the sink away. The first chunk keeps its own.

    first_tokens: of each chunk but the first, so many run again, in every layer; 0 gives `reposition`
    """

    first_tokens: int = 16

    name: ClassVar[str] = "epic"
    paper: ClassVar[str] = "EPIC (arXiv 2410.15332)"
    summary: ClassVar[str] = "runs the first tokens of each chunk again"

    def __post_init__(self) -> None:
        if self.first_tokens < 0:
            raise ConfigError(f"first_tokens is {self.first_tokens}; choose 0 or more")

    def candidates(self, context: Context) -> Tensor:
        rows = zip(context.chunk_starts[1:], context.chunk_tokens[1:], strict=True)
        slots = [torch.arange(start, start + min(count, self.first_tokens)) for start, count in rows]
        return torch.cat(slots).to(context.lm.device) if slots else torch.empty(0, dtype=torch.int64)
