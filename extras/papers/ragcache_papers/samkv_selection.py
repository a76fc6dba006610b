"""SamKV's selection: blocks, query vectors, scores (sections 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from ragcache.fusion.recompute import Context, highest
from ragcache.runtime import torch
from ragcache_papers.gather import Gather

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.models.attention import Attended

PAUTA = 3.0  # standard deviations beyond which the PauTa criterion calls a value an outlier


@dataclass(frozen=True, eq=False)
class BlockPartition:
    """Chunks cut into an initial part, middle blocks and a local part.

    A chunk shorter than its initial and local part has no middle. All tensors are int64; slots are ascending.

    anchors:      slots of initial and local tokens
    anchor_chunk: chunk of each of them
    local:        slots of local tokens alone
    local_chunk:  chunk of each of them
    middle:       slots of all other chunk tokens
    middle_block: block of each of them; blocks are numbered through the prompt
    block_chunk:  chunk of each block
    """

    anchors: Tensor
    anchor_chunk: Tensor
    local: Tensor
    local_chunk: Tensor
    middle: Tensor
    middle_block: Tensor
    block_chunk: Tensor

    @classmethod
    def of(cls, context: Context, block_size: int, initial_blocks: int, local_blocks: int) -> BlockPartition:
        parts: dict[str, list[int]] = {name: [] for name in cls.__dataclass_fields__}
        for chunk, (start, count) in enumerate(zip(context.chunk_starts, context.chunk_tokens, strict=True)):
            end = start + count
            middle_from = min(end, start + initial_blocks * block_size)
            middle_to = max(middle_from, end - local_blocks * block_size)
            blocks = ceil((middle_to - middle_from) / block_size)
            first_block = len(parts["block_chunk"])
            parts["anchors"] += [*range(start, middle_from), *range(middle_to, end)]
            parts["anchor_chunk"] += [chunk] * (count - (middle_to - middle_from))
            parts["local"] += range(middle_to, end)
            parts["local_chunk"] += [chunk] * (end - middle_to)
            parts["middle"] += range(middle_from, middle_to)
            parts["middle_block"] += [first_block + i // block_size for i in range(middle_to - middle_from)]
            parts["block_chunk"] += [chunk] * blocks
        device = context.lm.device
        return cls(**{name: torch.tensor(values, dtype=torch.int64, device=device) for name, values in parts.items()})

    @property
    def num_blocks(self) -> int:
        return self.block_chunk.shape[0]


def personalized(generic: Tensor, local: Tensor) -> Tensor:
    """Equation 1: a query vector for each document, biased by what the other documents' local queries have in common.

    generic: Q_que, [num_heads, head_dim]; local: Q_doc-loc, [num_docs, num_heads, head_dim]; at least two documents
    Returns [num_docs, num_heads, head_dim]. A vector is all heads of a layer side by side.
    """
    cosine = torch.nn.functional.cosine_similarity(local.flatten(1), generic.flatten()[None], dim=1).abs()
    weighted = cosine[:, None, None] * local
    return generic + (weighted.sum(0) - weighted) / (local.shape[0] - 1)


def top_share(blocks: Tensor, anchor: float) -> float:
    """Equation 2: the share of a document's middle blocks that surpass the anchor. blocks: their scores."""
    if not blocks.numel():
        return 0.0
    low, high = float(blocks.min()), float(blocks.max())
    return (high - anchor) / (high - low) if low < anchor <= high else 0.0


class Survey:
    """Watches the generic pass and scores every block in every layer.

    A score is the inner product of a block's mean key with its document's query vector, which has length 1, so that
    scores of different documents compare. (The mean of inner products is the inner product with the mean.)

    blocks:  by layer, float32 [num_blocks]
    anchors: by layer, float32 [num_chunks]: of all initial and local keys of a chunk
    middle:  by layer, float32 [num_middle]: of each middle token
    """

    def __init__(self, context: Context, pieces: BlockPartition, gather: Gather, local_rows: int) -> None:
        self._context = context
        self._pieces = pieces
        self._gather = gather
        self._local_rows = local_rows
        self._chunk_slots = context.chunk_slots()
        self.blocks: list[Tensor] = []
        self.anchors: list[Tensor] = []
        self.middle: list[Tensor] = []

    def __call__(self, attended: Attended) -> None:
        scores = self._token_scores(attended.layer, self._query_vectors(attended.query[0].float()))
        pieces, first = self._pieces, self._context.prefix_tokens
        middle = scores[pieces.middle - first]
        self.middle.append(middle)
        self.blocks.append(_means(middle, pieces.middle_block, pieces.num_blocks))
        num_chunks = len(self._context.chunk_tokens)
        self.anchors.append(_means(scores[pieces.anchors - first], pieces.anchor_chunk, num_chunks))

    def _query_vectors(self, query: Tensor) -> Tensor:
        """Query vector of each document, of length 1: [num_chunks, num_heads, head_dim].

        query: [num_heads, num_rows, head_dim].
        """
        rows, num_chunks = self._local_rows, len(self._context.chunk_tokens)
        generic = query[:, rows:].mean(1)
        if rows:
            local = _means(query[:, :rows].transpose(0, 1), self._pieces.local_chunk, num_chunks)
            vectors = personalized(generic, local)
        else:
            vectors = generic.expand(num_chunks, *generic.shape)
        return torch.nn.functional.normalize(vectors.flatten(1), dim=1).view(vectors.shape)

    def _token_scores(self, layer: int, vectors: Tensor) -> Tensor:
        """Every chunk token's key times its document's vector, float32 [num_chunk_tokens]."""
        keys = self._gather.keys(layer, self._chunk_slots).float()
        num_kv_heads = keys.shape[0]
        # All query heads of a KV head meet the same key: their products add up to that with their sum.
        folded = vectors.view(vectors.shape[0], num_kv_heads, -1, vectors.shape[2]).sum(2)
        parts = torch.split(keys, list(self._context.chunk_tokens), dim=1)
        return torch.cat([(part @ own[:, :, None]).sum((0, 2)) for part, own in zip(parts, folded, strict=True)])

    def shares(self, stable: Sequence[int]) -> list[float]:
        """Equation 3: of each document, the mean of its shares over the layers that attend stably."""
        owners = self._pieces.block_chunk
        return [
            sum(top_share(self.blocks[n][owners == i], float(self.anchors[n][i])) for n in stable) / len(stable)
            for i in range(len(self._context.chunk_tokens))
        ]

    def select(self, layer: int, shares: Sequence[float], cross_filter: bool) -> Tensor:
        """Blocks kept in this layer: each document's best, and of them, with `cross_filter`, the best 1/D."""
        scores, owners = self.blocks[layer], self._pieces.block_chunk
        found = []
        for chunk, share in enumerate(shares):
            own = (owners == chunk).nonzero()[:, 0]
            found.append(own[highest(scores[own], ceil(share * own.shape[0] - 1e-6))])
        candidates = torch.cat(found)
        if not cross_filter:
            return candidates
        return candidates[highest(scores[candidates], ceil(candidates.shape[0] / len(shares)))]

    def outliers(self, stable: Sequence[int]) -> Tensor:
        """Slots of middle tokens whose score, over the stable layers, stands out in its chunk (PauTa criterion)."""
        pieces, num_chunks = self._pieces, len(self._context.chunk_tokens)
        scores = torch.stack([self.middle[n] for n in stable]).mean(0)
        owners = pieces.block_chunk[pieces.middle_block]
        centred = scores - _means(scores, owners, num_chunks)[owners]
        deviation = _means(centred.square(), owners, num_chunks).sqrt()[owners]
        return pieces.middle[centred > PAUTA * deviation]


def _means(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Mean by group along the first dimension; 0 for a group without members."""
    sums = values.new_zeros(num_groups, *values.shape[1:]).index_add_(0, group, values)
    counts = torch.bincount(group, minlength=num_groups).clamp_min(1)
    return sums / counts.view(-1, *[1] * (values.dim() - 1))
