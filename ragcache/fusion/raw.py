"""Raw reuse: the baseline whose answers collapse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ragcache.fusion.layout import AddedTokens
from ragcache.fusion.method import FusionMethod
from ragcache.models.card import ModelCard


@dataclass(frozen=True)
class Concat(FusionMethod):
    """Joins blocks at the positions at which they were encoded, so that the chunks' positions overlap.

    An isolated chunk keeps positions 0, 1, ...; a chunk encoded after the prefix starts where the prefix ends. The
    suffix has its global positions. This is a plain concatenation of caches, and exists for comparison.
    """

    name: ClassVar[str] = "concat"
    paper: ClassVar[str] = "raw reuse (the baseline in KVLink table 1 and A3 table 1)"
    summary: ClassVar[str] = "joins blocks with the positions they were encoded at"

    def additions(self, lm: ModelCard) -> AddedTokens:
        return replace(super().additions(lm), positions="encoded")
