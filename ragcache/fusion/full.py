"""Full prefill: the baseline that every other method is measured against."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from ragcache.fusion.base import FusionMethod, Inputs, PhaseTimes, Prefilled
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt


@dataclass(frozen=True)
class Full(FusionMethod):
    """One causal forward pass over all ids; nothing is reused."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "baseline"
    summary: ClassVar[str] = "reads the whole prompt"
    reuses_blocks: ClassVar[bool] = False

    def prefill(
        self, lm: LanguageModel, prompt: Prompt, inputs: Inputs, times: PhaseTimes, reserve_tokens: int
    ) -> Prefilled:
        cache = lm.new_cache(prompt.num_tokens + reserve_tokens)
        started = time.perf_counter()
        logits = lm.run(prompt.ids, 0, cache)
        times.prefill_s += time.perf_counter() - started
        return Prefilled.of(cache, logits, prompt.num_tokens)
