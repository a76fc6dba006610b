"""A3: runs the tokens again that the question attends to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ragcache.errors import ConfigError, is_whole
from ragcache.fusion import recompute
from ragcache.lazy_torch import Tensor, torch
from ragcache_papers.gather import attention_received

SCORE_LAYER = 1


@dataclass(frozen=True)
class A3(recompute.RecomputeMethod):
    """Attention-aware fusion (A3, eq. 3 to 5).

    The suffix runs through layer 0 alone. In layer 1 each chunk token is scored by the attention it gets from the
    suffix, summed over the suffix's tokens and the heads; the tokens with the highest scores run again from there on,
    after they have passed through layer 0 themselves.

    Layer 0 loses nothing: its keys and values depend on the token alone, so the suffix's queries in layer 1 are exact.
    In layer 1 they meet the blocks' keys, not recomputed keys as in eq. 3, which would cost a full layer. Attention is
    the layer's own: with a sliding window, tokens outside the window get none and come last.

    ratio:           share of the chunks' tokens; 0 is `reposition`, 1 is full prefill
    pool_tokens:     scores are averaged over this many neighbouring tokens, an odd number, so that chosen tokens are
                     adjacent (5 in the authors' program, not mentioned in the paper); 1: no averaging
    boundary_tokens: first tokens of each chunk, which run whatever their scores; they count in `ratio`, but all run
                     even if they exceed it. A first chunk whose KV is exact has none (`Layout.exact`)
    tail_tokens:     last tokens of each chunk, likewise
    """

    ratio: float = 0.15
    pool_tokens: int = 1
    boundary_tokens: int = 0
    tail_tokens: int = 0

    name: ClassVar[str] = "a3"
    paper: ClassVar[str] = "A3 (arXiv 2511.17560)"
    summary: ClassVar[str] = "runs the tokens again that the question attends to"

    def __post_init__(self) -> None:
        recompute.check_ratio(self.ratio)
        recompute.check_tokens(boundary_tokens=self.boundary_tokens, tail_tokens=self.tail_tokens)
        check_pool(self.pool_tokens)

    def candidates(self, context: recompute.RecomputeContext) -> Tensor:
        slots = context.chunk_slots()
        return slots if self._count(context) or self._edges(context).numel() else slots[:0]

    def chooser(self, context: recompute.RecomputeContext) -> recompute.Choose:
        slots, count = context.chunk_slots(), self._count(context)
        always = self._edges(context)

        def choose(running: recompute.Running) -> Tensor | None:
            if running.layer < SCORE_LAYER:
                return slots[:0]
            if running.layer > SCORE_LAYER:
                return None
            return recompute.chosen(self._scores(running, context), slots, count, always)

        return choose

    def _edges(self, context: recompute.RecomputeContext) -> Tensor:
        return context.edges(self.boundary_tokens, self.tail_tokens)

    def _count(self, context: recompute.RecomputeContext) -> int:
        return round(self.ratio * sum(context.chunk_tokens))

    def _scores(self, running: recompute.Running, context: recompute.RecomputeContext) -> Tensor:
        """Return the attention that each chunk token gets from the suffix (eq. 3): float32 [chunk tokens]."""
        projected, (placed, _) = running.probe(), running.placed()
        keys = torch.cat([placed[:, :, : context.num_tokens], projected.key], dim=2)
        scores = attention_received(projected, keys, context.positions)[context.prefix_tokens : context.num_tokens]
        return pooled(scores, self.pool_tokens)


def check_pool(pool_tokens: object) -> None:
    """Raise ConfigError unless `pool_tokens` is an odd number of tokens."""
    if not is_whole(pool_tokens) or pool_tokens < 1 or pool_tokens % 2 == 0:
        raise ConfigError(f"pool_tokens is {pool_tokens!r}; choose an odd number of tokens, 1 for no pooling")


def pooled(scores: Tensor, width: int) -> Tensor:
    """Return each score's mean over `width` neighbouring scores, fewer at both ends: float32 [num_tokens]."""
    if width == 1:
        return scores
    pool = torch.nn.functional.avg_pool1d
    return pool(scores[None, None], width, stride=1, padding=width // 2, count_include_pad=False)[0, 0]
