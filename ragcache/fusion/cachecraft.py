"""Cache-Craft: how much of a chunk runs again follows from how much it leans on the chunks before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.recompute import Choose, Context, RecomputeMethod, Running, highest
from ragcache.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

SCORE_LAYER = 1
MOST = 2.0  # no chunk's impact is below a half: all of its tokens run


@dataclass(frozen=True)
class CacheCraft(RecomputeMethod):
    """Per-chunk shares by context impact (Cache-Craft, equations 3, 4, 9 to 12 and 14).

    inter(i, j) is the attention that the tokens of chunk i give to an earlier chunk j, intra(i) what they give to their
    own. With a = sum over j of inter(i, j) / (|i| |j|) and b = intra(i) / |i|^2, the Cache Context Impact is
    CCI = 1 / (1 + exp(-a / b)), and alpha * CCI is the share of its tokens that run again (Cache Fix Overhead, of a
    block that was read behind none of these chunks): those that give most attention to earlier chunks.

    The paper takes a and b from the pass that made the KV, over all layers. A block holds no attention, and one that
    was read alone gave none to others, so they are measured in this prompt: layer 0 runs in full, as in `cacheblend`,
    and layer 1's attention, which is then full prefill's own, decides. The first chunk has none before it and keeps
    what it has. The equations were read in public re-implementations that quote them, not in the paper itself.

    Left out: several variants of a chunk's KV by what it was read behind, and the overlap of their prefixes with the
    prompt's (equations 6 to 8), by which the paper chooses among them.

    alpha: share that runs again of a chunk that leans on others alone; 0 is `reposition`. One that leans on none has
           half of it, and 2 runs every chunk but the first
    """

    alpha: float = 0.3

    name: ClassVar[str] = "cachecraft"
    paper: ClassVar[str] = "Cache-Craft (arXiv 2502.15734)"
    summary: ClassVar[str] = "runs more of a chunk again the more it attends to the chunks before it"

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not 0 <= self.alpha <= MOST:
            raise ConfigError(f"alpha is {self.alpha!r}; choose a number from 0 (nothing runs again) to {MOST:g}")

    def candidates(self, context: Context) -> Tensor:
        slots = context.chunk_slots()
        some = self.alpha > 0 and len(context.chunks) > 1 and context.lm.shape.num_layers > SCORE_LAYER
        return slots if some else slots[:0]

    def chooser(self, context: Context) -> Choose:
        def choose(running: Running) -> Tensor | None:
            return self._chosen(_given(running, context), context) if running.layer == SCORE_LAYER else None

        return choose

    def _chosen(self, given: Tensor, context: Context) -> Tensor:
        """Slots of the tokens that run: int64, ascending. given: see `_given`"""
        sizes = torch.tensor(context.chunk_tokens, dtype=torch.float32, device=given.device)
        found, first = [], 0
        for chunk, count in enumerate(context.chunk_tokens):
            own = given[first : first + count]
            inter, intra = own[:, :chunk], own[:, chunk]
            a, b = (inter.sum(0) / (count * sizes[:chunk])).sum(), intra.sum() / count**2
            share = self.alpha * float(torch.sigmoid(a / b)) if chunk else 0.0
            taken = highest(inter.sum(1), min(count, math.ceil(share * count)))
            found.append(context.chunk_starts[chunk] + taken)
            first += count
        return torch.cat(found)


def _given(running: Running, context: Context) -> Tensor:
    """float32 [chunk tokens, chunks]: attention that each chunk token gives to each chunk in this layer, of all that it
    gives to the context before it."""
    projected, (placed, _), count = running.probe(), running.placed(), running.slots.shape[0]
    asking = projected._replace(query=projected.query[:, :, :count], positions=projected.positions[:count])
    keys = torch.cat([placed[:, :, : context.prefix_tokens], projected.key[:, :, :count]], dim=2)
    sizes = torch.tensor([context.prefix_tokens, *context.chunk_tokens], device=keys.device)
    groups = torch.repeat_interleave(torch.arange(len(sizes), device=keys.device), sizes)
    return asking.attention_given(keys, context.positions[: context.num_tokens], groups)[:, 1:]
