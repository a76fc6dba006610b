"""InfLLM over joined chunks: the blocks that the question asks for, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.fusion.recompute import highest
from ragcache.lazy_torch import torch
from ragcache_papers.gather import Gather, prefill_selecting

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.models.attention import Projected


@dataclass(frozen=True)
class InfLLM(FusionMethod):
    """InfLLM as SamKV's baseline Multi-InfLLM: the chunks' KV joined into one context, then single-context selection.

    The prefix, the first tokens of the joined chunks and the last ones are always kept. The rest is cut into blocks,
    whatever chunk their tokens come from. A block is looked up by its representative tokens: its relevance is their
    mean inner product with the suffix's queries, over all heads. Each layer keeps its most relevant blocks.

    InfLLM's representatives are those tokens of a block to which the queries after it attend most. A KV block holds
    no queries, so those of the suffix name the representatives too. Everything keeps its global position, where InfLLM
    gives all looked-up blocks one distance: the context fits the model here. A lone chunk is kept whole.

    block_size:            tokens per block (the paper's 128 goes with contexts of 100,000)
    top_blocks:            blocks kept in each layer; if all are kept, this is `reposition`
    representative_tokens: of each block (r_k)
    initial_tokens:        always kept at the beginning, besides the prefix
    local_tokens:          always kept before the suffix
    """

    block_size: int = 64
    top_blocks: int = 8
    representative_tokens: int = 4
    initial_tokens: int = 64
    local_tokens: int = 256

    name: ClassVar[str] = "infllm"
    paper: ClassVar[str] = "InfLLM (arXiv 2402.04617), as SamKV's baseline"
    summary: ClassVar[str] = (
        "keeps the blocks of the joined chunks that the question asks for; on a GPU it saves memory, no time"
    )

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("top_blocks", 0),
            ("representative_tokens", 1),
            ("initial_tokens", 0),
            ("local_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; choose at least {least}")

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        if len(request.blocks) < 2:
            return super().prefill(request)
        gather = Gather(request)
        first = request.known + self.initial_tokens
        last = max(first, gather.slots.shape[0] - self.local_tokens)
        initial, middle, local = gather.slots[:first], gather.slots[first:last], gather.slots[last:]

        def select(layer: int, suffix: Projected) -> Tensor:
            if not middle.numel():
                return gather.slots
            best = self._top(gather.keys(layer, middle), suffix.query[0])
            chosen = torch.isin(torch.arange(middle.shape[0], device=request.lm.device) // self.block_size, best)
            return torch.cat([initial, middle[chosen], local])

        return prefill_selecting(request, gather, select)

    def _top(self, keys: Tensor, query: Tensor) -> Tensor:
        """Return the most relevant blocks.

        keys: [num_kv_heads, num_tokens, head_dim]; query: [num_heads, rows, head_dim]
        """
        num_kv_heads, num_tokens, width = keys.shape
        folded = query.float().mean(1).view(num_kv_heads, -1, width).sum(1)
        scores = (keys.float() @ folded[:, :, None]).sum((0, 2))
        padded = torch.nn.functional.pad(scores, (0, -num_tokens % self.block_size), value=-torch.inf)
        best = padded.view(-1, self.block_size).topk(min(self.representative_tokens, self.block_size), dim=1).values
        there = best.isfinite()
        return highest(best.where(there, 0.0).sum(1) / there.sum(1), self.top_blocks)
