"""EPIC's LegoLink: the first tokens of each chunk run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragcache.errors import ConfigError, is_whole
from ragcache.fusion.layout import Layout
from ragcache.fusion.recompute import Context, RecomputeMethod
from ragcache.kv.request_layout import Span


@dataclass(frozen=True)
class Epic(RecomputeMethod):
    """LegoLink (EPIC, section 4): a chunk that was read alone takes its first tokens for attention sinks, and all that
    stands behind them looks there. Running these few again behind what really precedes them takes the sinks away; all
    other tokens keep what they have. The first chunk's sinks are where a prompt's sinks belong: it keeps its own.

    Later papers (A3, SamKV) describe it as running a chunk's last tokens again too; EPIC's own text speaks of a
    document's beginning. Nothing but the chunks' lengths decides, so the cost grows with the number of chunks alone.

    first_tokens: of each chunk but the first, so many run again, in every layer; 0 is `reposition`
    """

    first_tokens: int = 16

    name: ClassVar[str] = "epic"
    paper: ClassVar[str] = "EPIC (arXiv 2410.15332)"
    summary: ClassVar[str] = "runs the first tokens of each chunk again"

    def __post_init__(self) -> None:
        if not is_whole(self.first_tokens) or self.first_tokens < 0:
            raise ConfigError(f"first_tokens is {self.first_tokens!r}; choose a number of tokens, 0 or more")

    def reruns(self, layout: Layout) -> list[Span]:
        ends = ((piece.start, min(piece.end, piece.start + self.first_tokens)) for piece in layout.passages[1:])
        return [Span(start, stop) for start, stop in ends if start < stop]

    def candidates(self, context: Context) -> Tensor:
        rows = zip(context.chunk_starts[1:], context.chunk_tokens[1:], strict=True)
        slots = [torch.arange(start, start + min(count, self.first_tokens)) for start, count in rows]
        return torch.cat([torch.empty(0, dtype=torch.int64), *slots]).to(context.lm.device)
