"""Raw reuse: the baseline that collapses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ragcache.fusion.base import FusionMethod, Inputs, PhaseTimes, Placement, Prefilled, prefill_over
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt


@dataclass(frozen=True)
class Concat(FusionMethod):
    """Blocks joined with the positions they were encoded at, so that all chunks overlap.

    An isolated chunk keeps positions 0, 1, ...; one encoded behind the prefix starts where the prefix ends. The suffix
    stands at its global positions. This is what plain concatenation of caches does; kept for comparison.
    """

    name: ClassVar[str] = "concat"
    paper: ClassVar[str] = "raw reuse (the baseline in KVLink table 1 and A3 table 1)"
    summary: ClassVar[str] = "joins blocks with the positions they were encoded at"

    def prefill(
        self, lm: LanguageModel, prompt: Prompt, inputs: Inputs, times: PhaseTimes, reserve_tokens: int
    ) -> Prefilled:
        start = len(prompt.prefix_ids) if inputs.recipe.sees_prefix else 0
        placements = [Placement(block, start) for block in inputs.chunks]
        if inputs.prefix is not None:
            placements.insert(0, Placement(inputs.prefix, 0))
        return prefill_over(lm, prompt, placements, times, reserve_tokens)
