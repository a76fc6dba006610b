"""EPIC's LegoLink: the tokens at the edges of each chunk run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ragcache.fusion.layout import Layout, Span
from ragcache.fusion.recompute import RecomputeContext, RecomputeMethod, check_tokens, edge_spans

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Epic(RecomputeMethod):
    """LegoLink (EPIC, section 4): a chunk that was read alone takes its first tokens for attention sinks, and all that
    stands behind them looks there. Running these few again behind what really precedes them takes the sinks away; all
    other tokens keep what they have. A first chunk is left out where its block was read behind just what stands before
    it, the prefix (recipe `prefix`) or nothing: its KV is exact.

    EPIC's own text speaks of a document's beginning. Later papers (A3, SamKV) describe LegoLink as running a chunk's
    last tokens again too: `last_tokens`. Nothing but the chunks' lengths decides, so the cost grows with the number of
    chunks alone.

    first_tokens: of each chunk but an exact first one, so many run again, in every layer
    last_tokens:  the same at each chunk's end

    Both 0 is `reposition`.
    """

    first_tokens: int = 16
    last_tokens: int = 0

    name: ClassVar[str] = "epic"
    paper: ClassVar[str] = "EPIC (arXiv 2410.15332)"
    summary: ClassVar[str] = "runs the first tokens of each chunk again, and the last ones where asked"
    keeps_context: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_tokens(first_tokens=self.first_tokens, last_tokens=self.last_tokens)

    def reruns(self, layout: Layout) -> list[Span]:
        chunks = (Span(piece.start, piece.end) for piece in layout.passages if piece != layout.exact)
        return [span for chunk in chunks for span in edge_spans(chunk, self.first_tokens, self.last_tokens)]

    def candidates(self, context: RecomputeContext) -> Tensor:
        return context.edges(self.first_tokens, self.last_tokens)
