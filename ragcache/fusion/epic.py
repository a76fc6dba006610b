"""EPIC's LegoLink: the tokens at the edges of each chunk run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ragcache.fusion.layout import Layout, Span
from ragcache.fusion.recompute import RecomputeContext, RecomputeMethod, check_tokens, edge_spans
from ragcache.lazy_torch import Tensor


@dataclass(frozen=True)
class Epic(RecomputeMethod):
    """Runs the first tokens of each chunk again: LegoLink (EPIC, section 4).

    A chunk that was read alone uses its first tokens as attention sinks, and all later tokens attend to them. Running
    these few tokens again with their true context removes the sinks; all other tokens keep their block's KV. A first
    chunk is skipped if its block was read after exactly the text that comes before it, the prefix (recipe `prefix`) or
    nothing: its KV is exact.

    EPIC's own text describes a document's beginning. Later papers (A3, SamKV) describe LegoLink as also running a
    chunk's last tokens again: `last_tokens`. The choice depends only on the chunks' lengths, so the cost grows only
    with the number of chunks.

    first_tokens: tokens at the start of each chunk that run again in every layer, except in an exact first chunk
    last_tokens:  the same for the end of each chunk

    With both 0 it is `reposition`.
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
