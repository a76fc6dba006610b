"""Methods that place, in each layer, only what the suffix asks for there."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from ragcache.fusion.base import PhaseTimes, Prefilled
from ragcache.fusion.gather import Gather
from ragcache.models.attention import Projected
from ragcache.models.layerwise import LayerPoint
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt

Select = Callable[[int, Projected], Tensor]
"""What a layer keeps: slots, int64, ascending, given its index and the suffix's queries, keys and values in it."""


def prefill_selecting(
    lm: LanguageModel,
    prompt: Prompt,
    gather: Gather,
    suffix_from: int,
    select: Select,
    times: PhaseTimes,
    reserve_tokens: int,
) -> Prefilled:
    """Run the suffix, from this position on; before each layer ask which of the context's tokens are placed in it."""
    chosen: dict[int, Tensor] = {}

    def before_layer(point: LayerPoint) -> None:
        chosen[point.layer] = select(point.layer, point.probe())

    def fill(layer: int) -> None:
        started = time.perf_counter()
        gather.place(cache, layer, chosen[layer])
        times.place_s += time.perf_counter() - started

    cache = lm.new_cache(prompt.num_tokens + reserve_tokens, fill)
    started, placed = time.perf_counter(), times.place_s
    logits = lm.run(prompt.suffix_ids, suffix_from, cache, before_layer=before_layer)
    times.prefill_s += time.perf_counter() - started - (times.place_s - placed)
    return Prefilled.of(cache, logits, suffix_from + len(prompt.suffix_ids))
