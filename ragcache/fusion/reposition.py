"""Blocks moved to their global positions; only the suffix runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ragcache.fusion.layout import AddedTokens
from ragcache.fusion.method import FusionMethod
from ragcache.models.card import ModelCard


@dataclass(frozen=True)
class Reposition(FusionMethod):
    """Each key is rotated to the position that its token has in the joined prompt (KVLink section 2.2).

    Over isolated blocks this is one forward pass under a block-diagonal causal mask with global positions. It is
    KVLink without link tokens, the inference of Block-Attention and the position update of PIE.
    """

    name: ClassVar[str] = "reposition"
    paper: ClassVar[str] = "KVLink 2.2 (arXiv 2502.16002), Block-Attention (2409.15355), PIE (2407.03157)"
    summary: ClassVar[str] = "moves each block to its global positions"
    joins_states: ClassVar[bool] = True
    keeps_context: ClassVar[bool] = True


# Raw reuse: the baseline that collapses.


@dataclass(frozen=True)
class Concat(FusionMethod):
    """Blocks joined with the positions they were encoded at, so that all chunks overlap.

    An isolated chunk keeps positions 0, 1, ...; one encoded behind the prefix starts where the prefix ends. The suffix
    stands at its global positions. This is what plain concatenation of caches does; kept for comparison.
    """

    name: ClassVar[str] = "concat"
    paper: ClassVar[str] = "raw reuse (the baseline in KVLink table 1 and A3 table 1)"
    summary: ClassVar[str] = "joins blocks with the positions they were encoded at"

    def additions(self, lm: ModelCard) -> AddedTokens:
        return replace(super().additions(lm), positions="encoded")
