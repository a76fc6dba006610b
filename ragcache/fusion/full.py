"""Full prefill: the baseline that every other method is measured against."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.base import FusionMethod, Inputs, PhaseTimes, Prefilled, place_exact
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt


@dataclass(frozen=True)
class Full(FusionMethod):
    """One causal forward pass over all ids, or over those behind a prefix whose KV such a pass has left before.

    The passages' blocks are not read. Logits are the same with such a prefix and without, to rounding.

    reuse: False runs every token, as a measurement of full prefill wants it
    """

    reuse: bool = True

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "baseline"
    summary: ClassVar[str] = "reads the whole prompt"
    reuses_blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.reuse, bool):
            raise ConfigError(f"reuse is {self.reuse!r}; give true or false")

    @property
    def takes_exact(self) -> bool:
        return self.reuse

    @property
    def keeps_context(self) -> bool:
        return True

    def prefill(
        self, lm: LanguageModel, prompt: Prompt, inputs: Inputs, times: PhaseTimes, reserve_tokens: int
    ) -> Prefilled:
        exact = inputs.exact
        start = 0 if exact is None else exact.num_tokens

        def fill(layer: int) -> None:
            if exact is not None and start:
                began = time.perf_counter()
                place_exact(lm, exact, cache, layer)
                times.place_s += time.perf_counter() - began

        cache = lm.new_cache(prompt.num_tokens + reserve_tokens, fill)
        started, placed = time.perf_counter(), times.place_s
        logits = lm.run(prompt.ids[start:], start, cache)
        times.prefill_s += time.perf_counter() - started - (times.place_s - placed)
        return Prefilled.of(cache, logits, prompt.num_tokens)
