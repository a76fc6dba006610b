"""Attention entropy: a shared sink, and attention to few of the parallel chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.layout import AddedTokens
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.fusion.recompute import highest
from ragcache.lazy_torch import torch
from ragcache.models.card import ModelCard
from ragcache_papers.gather import Gather, attention_received, prefill_selecting

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.models.attention import Projected


@dataclass(frozen=True)
class Entropy(FusionMethod):
    """Attention Entropy is a Key Factor: parallel encoding fails where attention spreads too far; two cures.

    Attention sinks: every chunk is encoded after the shared prefix, so that all chunks share a single sink.
    Selective attention: each layer attends only to the chunks that draw most of the suffix's attention in it, in
    prefill and in decoding.

    Chosen here: chunks share positions, as by `ape`; the whole suffix selects, once per layer, by the attention of all
    its tokens and heads, so that chunks not selected need not be kept.

    top_k: chunks kept in each layer; if all are kept, this is parallel encoding after a shared prefix
    """

    top_k: int = 4

    name: ClassVar[str] = "entropy"
    paper: ClassVar[str] = "Attention Entropy is a Key Factor (arXiv 2412.16545)"
    summary: ClassVar[str] = (
        "reads chunks side by side behind one prefix and keeps those that draw most attention; "
        "on a GPU it saves memory, no time"
    )
    recipes: ClassVar[tuple[str, ...]] = ("prefix", "primer")

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; choose at least 1 chunk")

    def additions(self, lm: ModelCard) -> AddedTokens:
        return replace(super().additions(lm), positions="parallel")

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        if len(request.blocks) <= self.top_k:
            return super().prefill(request)
        gather = Gather(request)
        prefix, lengths = request.known, [block.num_tokens for block in request.blocks]
        ranks = [rank for rank, length in enumerate(lengths) for _ in range(length)]
        owners = torch.tensor(ranks, device=request.lm.device)

        def select(layer: int, suffix: Projected) -> Tensor:
            keys = torch.cat([gather.all_keys(layer)[None], suffix.key], dim=2)
            drawn = attention_received(suffix, keys, torch.cat([gather.positions, suffix.positions]))
            of_chunks = drawn[prefix : prefix + owners.shape[0]]
            best = highest(of_chunks.new_zeros(len(lengths)).index_add_(0, owners, of_chunks), self.top_k)
            return torch.cat([gather.slots[:prefix], prefix + torch.isin(owners, best).nonzero()[:, 0]])

        return prefill_selecting(request, gather, select)
