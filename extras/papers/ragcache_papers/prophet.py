"""ProphetKV: the question first attends to the reused KV in all layers; the tokens with most attention run again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import ConfigError, is_whole
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.fusion.recompute import RecomputeContext, Running, check_ratio, check_tokens, chosen, open_cache, rerun
from ragcache.lazy_torch import Tensor, torch
from ragcache.models.card import ModelCard
from ragcache.prompt import Prompt
from ragcache_papers.a3 import check_pool, pooled
from ragcache_papers.gather import attention_received

if TYPE_CHECKING:
    from ragcache.kv.fused_cache import FusedCache


@dataclass(frozen=True)
class Prophet(FusionMethod):
    """Dual-stage recomputation driven by the question (ProphetKV).

    1. The suffix runs over the reused KV, through all layers. In each layer, every chunk token is scored by the
       attention that it gets from the suffix, softmax(q K' / sqrt(d)) over the keys K' of the context alone.
    2. The scores of all layers are fused with equal weights, and the best tokens run again in all layers, followed by
       the suffix, over the same cache.

    The paper's score of a layer is the sum of that softmax over the question's tokens, and its fusion is the uniform
    mean over layers; both were read in public re-implementations that quote its algorithm 1 and equation 8, not in the
    paper itself. Heads are summed, too. Sums and means rank alike, so this is the sum over layers, heads and tokens.

    Chosen here: the whole suffix scores, the template's tail included. The context is the prefix, which only takes its
    share of the softmax, and the chunks. A layer's own scaling, soft cap and attention sink hold, and its sliding
    window: suffix tokens whose window in a layer covers no chunk do not count there.

    `layers` is the half of QCFuse (arXiv 2606.05875) on critical layers: only profiled layers score, and the first
    stage ends after the last of them, so that blocks of the layers above need not have arrived by then. QCFuse's other
    half, a question that sees compact anchors of each chunk instead of all tokens, is left out.

    ratio:           share of the chunks' tokens; 0 is `reposition`, 1 is full prefill
    layers:          the layers that score, from 0; None: all
    boundary_tokens: first tokens of each chunk, which run whatever their scores; they count in `ratio`, but all run
                     even if they exceed it. A first chunk whose KV is exact has none (`Layout.exact`)
    tail_tokens:     last tokens of each chunk, likewise
    pool_tokens:     scores are averaged over this many neighbouring tokens, an odd number, so that chosen tokens are
                     adjacent (not in the paper); 1: no averaging
    """

    ratio: float = 0.2
    layers: Sequence[int] | None = None
    boundary_tokens: int = 0
    tail_tokens: int = 0
    pool_tokens: int = 1

    name: ClassVar[str] = "prophet"
    paper: ClassVar[str] = "ProphetKV (arXiv 2602.02579)"
    summary: ClassVar[str] = "runs the tokens again that the question attends to in all layers of a first pass"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_tokens(boundary_tokens=self.boundary_tokens, tail_tokens=self.tail_tokens)
        check_pool(self.pool_tokens)
        if self.layers is not None:
            object.__setattr__(self, "layers", _layer_numbers(self.layers))

    def check(self, lm: ModelCard, prompt: Prompt) -> None:
        super().check(lm, prompt)
        if self.layers is not None and max(self.layers) >= lm.num_layers:
            raise ConfigError(f"layers names layer {max(self.layers)}; {lm.name} has layers 0 to {lm.num_layers - 1}")

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        context = RecomputeContext.of(request)
        slots, always = context.chunk_slots(), context.edges(self.boundary_tokens, self.tail_tokens)
        count = max(round(self.ratio * slots.shape[0]), always.shape[0])
        if not count:
            return super().prefill(request)
        cache, scores = open_cache(request, context), torch.zeros(slots.shape[0], device=request.lm.device)
        if always.shape[0] < count < slots.shape[0]:
            self._ask(request, context, cache, scores)
        return rerun(request, context, cache, chosen(pooled(scores, self.pool_tokens), slots, count, always))

    def _ask(self, request: PrefillRequest, context: RecomputeContext, cache: FusedCache, scores: Tensor) -> None:
        """Run the suffix through the layers that score, and add to the scores, float32 [chunk tokens]."""
        layers = range(context.lm.shape.num_layers) if self.layers is None else self.layers

        def score(running: Running) -> None:
            if running.layer > max(layers):
                raise _AllAsked
            if running.layer in layers:
                scores.add_(_attention(running, context))

        with suppress(_AllAsked):
            rerun(request, context, cache, context.chunk_slots()[:0], score)


class _AllAsked(Exception):  # noqa: N818 - it ends the first stage early; it is no error
    """All layers that score have done so."""


def _attention(running: Running, context: RecomputeContext) -> Tensor:
    """Return the attention that each chunk token gets from the suffix in this layer: float32 [chunk tokens].

    It is a share of all attention to the context.
    """
    asking, (keys, _) = running.probe(), running.placed()
    positions = context.positions[: context.num_tokens]
    if asking.window is not None:
        seeing = asking.positions - positions[-1] < asking.window
        asking = asking._replace(query=asking.query[:, :, seeing], positions=asking.positions[seeing])
    return attention_received(asking, keys[:, :, : context.num_tokens], positions)[context.prefix_tokens :]


def _layer_numbers(given: object) -> tuple[int, ...]:
    """Return the layers' numbers. Raises ConfigError unless `given` is a list of layers."""
    if isinstance(given, Sequence) and given and all(is_whole(layer) and layer >= 0 for layer in given):
        return tuple(given)
    raise ConfigError(f"layers is {given!r}; give the numbers of those that score, such as [4, 9], or None for all")
