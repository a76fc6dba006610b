"""CacheBlend: the tokens whose keys and values are furthest from exact run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion import recompute
from ragcache.fusion.layout import Layout
from ragcache.lazy_torch import Tensor, torch

CHECK_LAYER = 1
WIDER = 0.25  # gradual filtering begins this much above the ratio and ends this much below it


@dataclass(frozen=True)
class CacheBlend(recompute.RecomputeMethod):
    """Runs high-KV-deviation tokens again (CacheBlend, section 4.3).

    Layer 0 runs in full: its keys and values depend only on the token, so layer 1 is the first in which they depend on
    other tokens. In layer 1 the keys and values of every chunk token are computed. The tokens whose new keys and values
    deviate most from their block's run on; all others keep their block's keys and values.

    Gradual filtering (figure 9): slightly more than `ratio` of the tokens continue from layer 1, and every later layer
    drops those that deviate least in it. The paper gives no figures; here the share falls linearly from 1.25 to 0.75 of
    `ratio`, with a flatter slope if it would exceed 1, so that `ratio` is the mean over the layers above the first.

    ratio:           share of the chunks' tokens; 0 is `reposition`, 1 is full prefill
    gradual:         filter layer by layer; each layer's projections are then computed twice
    boundary_tokens: number of first tokens of each chunk that run whatever their deviation. They count towards `ratio`,
                     and all of them run even if they exceed it. In a first chunk whose KV is exact (`Layout.exact`),
                     tokens run only by their deviation
    tail_tokens:     number of last tokens of each chunk that are treated in the same way
    """

    ratio: float = 0.16
    gradual: bool = False
    boundary_tokens: int = 0
    tail_tokens: int = 0

    name: ClassVar[str] = "cacheblend"
    paper: ClassVar[str] = "CacheBlend (arXiv 2405.16444)"
    summary: ClassVar[str] = "runs the tokens again whose keys and values deviate most"
    keeps_context: ClassVar[bool] = True
    narrows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        recompute.check_ratio(self.ratio)
        recompute.check_tokens(boundary_tokens=self.boundary_tokens, tail_tokens=self.tail_tokens)
        if not isinstance(self.gradual, bool):
            raise ConfigError(f"gradual is {self.gradual!r}; choose True or False")

    def num_reruns(self, layout: Layout) -> int:
        return round(self.ratio * sum(len(piece.ids) for piece in layout.passages))

    def candidates(self, context: recompute.RecomputeContext) -> Tensor:
        slots = context.chunk_slots()
        some = any(self._counts(context)[CHECK_LAYER:]) or self._edges(context).numel()
        return slots if some else slots[:0]

    def chooser(self, context: recompute.RecomputeContext) -> recompute.Choose | None:
        counts, always = self._counts(context), self._edges(context)

        def choose(running: recompute.Running) -> Tensor | None:
            count = max(counts[running.layer], always.shape[0])
            if running.layer < CHECK_LAYER or count == running.slots.shape[0]:
                return None
            return recompute.chosen(_deviation(running), running.slots, count, always)

        return choose

    def _edges(self, context: recompute.RecomputeContext) -> Tensor:
        return context.edges(self.boundary_tokens, self.tail_tokens)

    def _counts(self, context: recompute.RecomputeContext) -> list[int]:
        """Return how many chunk tokens run in each layer."""
        num_tokens, layers = sum(context.chunk_tokens), context.lm.shape.num_layers
        above = layers - CHECK_LAYER
        shares = [self.ratio] * above
        if self.gradual and above > 1:
            wider = min(WIDER * self.ratio, 1 - self.ratio)
            shares = [self.ratio + wider * (1 - 2 * layer / (above - 1)) for layer in range(above)]
        return [num_tokens] * CHECK_LAYER + [round(share * num_tokens) for share in shares]


def _deviation(running: recompute.Running) -> Tensor:
    """Compute the KV deviation (CacheBlend, section 4.1) of the running context tokens: float32 [num_slots].

    It is the squared L2 distance between a token's new keys and values and the placed ones, over all heads. Both keys
    are rotated to the same position, which does not change their distance.
    """
    projected, count = running.probe(), running.slots.shape[0]
    pairs = zip((projected.key, projected.value), running.placed(), strict=True)
    parts = [_distances(new[0, :, :count], placed[0].index_select(1, running.slots)) for new, placed in pairs]
    return torch.stack(parts).sum(0)


def _distances(new: Tensor, placed: Tensor) -> Tensor:
    return (new.float() - placed.float()).square().sum((0, 2))
