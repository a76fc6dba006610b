"""Blocks moved to their global positions; only the suffix runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ragcache.fusion.method import FusionMethod


@dataclass(frozen=True)
class Reposition(FusionMethod):
    """Rotates each key to the position of its token in the joined prompt (KVLink section 2.2).

    Over isolated blocks this equals one forward pass under a block-diagonal causal mask with global positions. It is
    KVLink without link tokens, the inference of Block-Attention and the position update of PIE.
    """

    name: ClassVar[str] = "reposition"
    paper: ClassVar[str] = "KVLink 2.2 (arXiv 2502.16002), Block-Attention (2409.15355), PIE (2407.03157)"
    summary: ClassVar[str] = "moves each block to its global positions"
    joins_states: ClassVar[bool] = True
    keeps_context: ClassVar[bool] = True
