"""Recompute methods: blocks in place, some of their tokens run again, the whole suffix behind them.

A method says which context tokens run, and may think again before every layer. All else is here: placing, slots,
positions, the suffix.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ragcache.errors import ConfigError
from ragcache.fusion.base import FusionMethod, Inputs, PhaseTimes, Placer, Prefilled, consecutive, prefill_over
from ragcache.kv.block import KVBlock
from ragcache.models.attention import Projected
from ragcache.models.layerwise import LayerPoint
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt


@dataclass(frozen=True)
class Context:
    """What stands before the suffix. A context token's slot in the cache is its position in the prompt.

    prefix_tokens:  tokens of the prefix, whose KV is exact and never runs again
    chunk_starts:   slot of each chunk's first token
    chunk_tokens:   tokens of each chunk
    suffix_tokens:  tokens of the suffix
    chunks:         the blocks, keys before RoPE
    """

    lm: LanguageModel
    prefix_tokens: int
    chunk_starts: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    suffix_tokens: int
    chunks: Sequence[KVBlock]

    @classmethod
    def of(cls, lm: LanguageModel, prompt: Prompt, inputs: Inputs) -> Context:
        lengths = tuple(len(chunk) for chunk in prompt.chunk_ids)
        starts, start = [], len(prompt.prefix_ids)
        for length in lengths:
            starts.append(start)
            start += length
        return cls(lm, len(prompt.prefix_ids), tuple(starts), lengths, len(prompt.suffix_ids), inputs.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens of prefix and chunks."""
        return self.prefix_tokens + sum(self.chunk_tokens)

    def chunk_slots(self) -> Tensor:
        """int64: every chunk token's slot."""
        return torch.arange(self.prefix_tokens, self.num_tokens, device=self.lm.device)


@dataclass(frozen=True, eq=False)
class Running:
    """The moment before a layer runs, in slots.

    layer: its index
    slots: int64, ascending: the context tokens that have come so far; the suffix comes behind them
    """

    layer: int
    slots: Tensor
    _point: LayerPoint

    def probe(self) -> Projected:
        """Queries, keys and values of the running tokens, suffix included, in this layer; they go no further."""
        return self._point.probe()

    def placed(self) -> tuple[Tensor, Tensor]:
        """Keys and values that stand in this layer, by slot: [1, num_kv_heads, num_tokens, head_dim], keys rotated.

        Nothing has run in this layer yet: a context token's are those of its block; the suffix's mean nothing.
        """
        keys, values, _ = self._point.held()
        return keys, values


Choose = Callable[[Running], Tensor | None]
"""Which context tokens run from this layer on: slots, int64, ascending; None: no change."""


@dataclass(frozen=True)
class RecomputeMethod(FusionMethod):
    """A method that writes two things: which tokens may run, and which of them do."""

    @abstractmethod
    def candidates(self, context: Context) -> Tensor:
        """Slots of the context tokens that may run in any layer: int64, ascending. None of them: `reposition`."""

    def chooser(self, context: Context) -> Choose | None:
        """A fresh function to be asked before every layer; None: the candidates run in all layers."""
        return None

    def prefill(
        self, lm: LanguageModel, prompt: Prompt, inputs: Inputs, times: PhaseTimes, reserve_tokens: int
    ) -> Prefilled:
        context = Context.of(lm, prompt, inputs)
        candidates = self.candidates(context)
        placements = consecutive(([inputs.prefix] if inputs.prefix is not None else []) + list(inputs.chunks))
        if not candidates.numel():
            return prefill_over(lm, prompt, placements, times, reserve_tokens)
        choose = self.chooser(context)
        placer = Placer(lm, placements)
        suffix = torch.arange(context.num_tokens, prompt.num_tokens, device=lm.device)

        def fill(layer: int) -> None:
            started = time.perf_counter()
            placer.place(cache, layer)
            cache.reserve(layer, suffix)
            times.place_s += time.perf_counter() - started

        cache = lm.new_cache(prompt.num_tokens + reserve_tokens, fill)
        slots = torch.cat([candidates, suffix])
        started, placed = time.perf_counter(), times.place_s
        ids = torch.tensor(prompt.ids, device=lm.device)[slots]
        before = None if choose is None else _in_rows(choose, slots, candidates.numel())
        logits = lm.run(ids, slots, cache, slots=slots, before_layer=before)
        times.prefill_s += time.perf_counter() - started - (times.place_s - placed)
        return Prefilled.of(cache, logits, prompt.num_tokens)


def check_ratio(ratio: float) -> None:
    """Raises ConfigError for what is no share in [0, 1]."""
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 <= ratio <= 1:
        raise ConfigError(f"ratio is {ratio!r}; choose the share of the chunks' tokens, a number from 0 to 1")


def highest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ascending; the first of equals go first, on every device."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def _in_rows(choose: Choose, slots: Tensor, num_candidates: int) -> Callable[[LayerPoint], Tensor | None]:
    """`choose` for `lm.run`, which speaks of the pass's tokens by index, the suffix among them."""
    suffix = torch.arange(num_candidates, slots.shape[0], device=slots.device)

    def before_layer(point: LayerPoint) -> Tensor | None:
        running = point.rows[point.rows < num_candidates]
        chosen = choose(Running(point.layer, slots[running], point))
        if chosen is None:
            return None
        return torch.cat([torch.searchsorted(slots[:num_candidates], chosen), suffix])

    return before_layer
