"""SamKV's selection: blocks, query vectors, scores (sections 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from ragcache.fusion.recompute import RecomputeContext, highest
from ragcache.lazy_torch import Tensor, torch
from ragcache_papers.gather import Gather
from ragcache_papers.samkv_sidecar import PAUTA, Sidecar, Sizes

if TYPE_CHECKING:
    from ragcache.models.attention import Attended


@dataclass(frozen=True, eq=False)
class BlockPartition:
    """Chunks cut into an initial part, middle blocks and a local part.

    A chunk shorter than its initial and local part has no middle. All tensors are int64; slots are ascending.

    anchors:      slots of initial and local tokens
    anchor_chunk: chunk of each anchor token
    local:        slots of local tokens alone
    local_chunk:  chunk of each local token
    middle:       slots of all other chunk tokens
    middle_block: block of each middle token; blocks are numbered through the prompt
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
    def of(cls, context: RecomputeContext, sizes: Sizes) -> BlockPartition:
        parts: dict[str, list[int]] = {name: [] for name in cls.__dataclass_fields__}
        for chunk, (start, count) in enumerate(zip(context.chunk_starts, context.chunk_tokens, strict=True)):
            end, (begins, ends), blocks = start + count, sizes.cut(count), sizes.num_blocks(count)
            middle_from, middle_to = start + begins, start + ends
            first_block = len(parts["block_chunk"])
            parts["anchors"] += [*range(start, middle_from), *range(middle_to, end)]
            parts["anchor_chunk"] += [chunk] * (count - (middle_to - middle_from))
            parts["local"] += range(middle_to, end)
            parts["local_chunk"] += [chunk] * (end - middle_to)
            parts["middle"] += range(middle_from, middle_to)
            parts["middle_block"] += [first_block + i // sizes.block_size for i in range(middle_to - middle_from)]
            parts["block_chunk"] += [chunk] * blocks
        device = context.lm.device
        return cls(**{name: torch.tensor(values, dtype=torch.int64, device=device) for name, values in parts.items()})

    @property
    def num_blocks(self) -> int:
        return self.block_chunk.shape[0]


def personalized(generic: Tensor, local: Tensor) -> Tensor:
    """Return a query vector per document, biased by the common part of the other documents' local queries (equation 1).

    generic: Q_que, [num_heads, head_dim]; local: Q_doc-loc, [num_docs, num_heads, head_dim]; at least two documents
    Returns [num_docs, num_heads, head_dim]. A vector is all heads of a layer side by side.
    """
    cosine = torch.nn.functional.cosine_similarity(local.flatten(1), generic.flatten()[None], dim=1).abs()
    weighted = cosine[:, None, None] * local
    return generic + (weighted.sum(0) - weighted) / (local.shape[0] - 1)


def top_share(low: float, high: float, anchor: float) -> float:
    """Return the share of a document's middle blocks that surpass the anchor (equation 2).

    low, high: scores of its least and its most important block
    """
    return (high - anchor) / (high - low) if low < anchor <= high else 0.0


class Survey:
    """Watches the generic pass and scores every block in every layer, by the keys of all tokens.

    A score is the inner product of a block's mean key with its document's query vector, which has length 1, so that
    scores of different documents compare. (The mean of inner products is the inner product with the mean.)

    blocks:  by layer, float32 [num_blocks]
    anchors: by layer, float32 [num_chunks]: of all initial and local keys of a chunk
    middle:  by layer, float32 [num_middle]: of each middle token
    """

    def __init__(self, context: RecomputeContext, pieces: BlockPartition, gather: Gather, local_rows: int) -> None:
        self._context = context
        self._pieces = pieces
        self._gather = gather
        self._local_rows = local_rows
        self._chunk_slots = context.chunk_slots()
        self.blocks: list[Tensor] = []
        self.anchors: list[Tensor] = []
        self.middle: list[Tensor] = []

    def __call__(self, attended: Attended) -> None:
        self._score(attended.layer, self._query_vectors(attended.layer, attended.query[0].float()))

    def _score(self, layer: int, vectors: Tensor) -> None:
        """Score a layer's tokens and blocks. vectors: of each document, as `_query_vectors` returns them"""
        scores = self._token_scores(layer, vectors)
        pieces, first = self._pieces, self._context.prefix_tokens
        middle = scores[pieces.middle - first]
        self.middle.append(middle)
        self.blocks.append(_means(middle, pieces.middle_block, pieces.num_blocks))
        num_chunks = len(self._context.chunk_tokens)
        self.anchors.append(_means(scores[pieces.anchors - first], pieces.anchor_chunk, num_chunks))

    def _query_vectors(self, layer: int, query: Tensor) -> Tensor:
        """Return each document's query vector, of length 1: [num_chunks, num_heads, head_dim].

        query: [num_heads, num_rows, head_dim].
        """
        generic, local = query[:, self._local_rows :].mean(1), self._local_queries(layer, query)
        if local is None:
            vectors = generic.expand(len(self._context.chunk_tokens), *generic.shape)
        else:
            vectors = personalized(generic, local)
        return torch.nn.functional.normalize(vectors.flatten(1), dim=1).view(vectors.shape)

    def _local_queries(self, layer: int, query: Tensor) -> Tensor | None:
        """Return the mean query of each document's local tokens, [num_chunks, num_heads, head_dim]; None: no bias."""
        if not (rows := self._local_rows):
            return None
        return _means(query[:, :rows].transpose(0, 1), self._pieces.local_chunk, len(self._context.chunk_tokens))

    def _token_scores(self, layer: int, vectors: Tensor) -> Tensor:
        """Return every chunk token's key times its document's vector, float32 [num_chunk_tokens]."""
        keys = self._gather.keys(layer, self._chunk_slots).float()
        parts = torch.split(keys, list(self._context.chunk_tokens), dim=1)
        return torch.cat([_products(part, own) for part, own in zip(parts, vectors, strict=True)])

    def stable(self, count: int) -> Sequence[int]:
        """Return `count` layers (N*) as those that attend stably: the last, as only sidecars tell which are stable."""
        layers = self._context.lm.shape.num_layers
        return range(layers - count, layers)

    def shares(self, stable: Sequence[int]) -> list[float]:
        """Return the mean of each document's shares over the layers that attend stably (equation 3)."""
        found = []
        for chunk in range(len(self._context.chunk_tokens)):
            own = self._pieces.block_chunk == chunk
            shares = (self._share(layer, chunk, self.blocks[layer][own]) for layer in stable)
            found.append(sum(shares) / len(stable) if bool(own.any()) else 0.0)
        return found

    def _share(self, layer: int, chunk: int, scores: Tensor) -> float:
        """Return a document's share. scores: of its blocks, whose greatest and least replace those of A.1's blocks"""
        return top_share(float(scores.min()), float(scores.max()), float(self.anchors[layer][chunk]))

    def select(self, layer: int, shares: Sequence[float], cross_filter: bool) -> Tensor:
        """Return the blocks kept in this layer: each document's best, and with `cross_filter` the best 1/D of these."""
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
        """Return the slots of middle tokens whose score, over the stable layers, is an outlier in its chunk (PauTa)."""
        pieces, num_chunks = self._pieces, len(self._context.chunk_tokens)
        scores = torch.stack([self.middle[n] for n in stable]).mean(0)
        owners = pieces.block_chunk[pieces.middle_block]
        centred = scores - _means(scores, owners, num_chunks)[owners]
        deviation = _means(centred.square(), owners, num_chunks).sqrt()[owners]
        return pieces.middle[centred > PAUTA * deviation]


class SidecarSurvey(Survey):
    """Scores blocks by their sidecars: no key of a middle token is read, and local queries, the greatest and
    the least block, outliers and stable layers are those of each document's own encoding (appendix A).

    Scores are those of `Survey`: a rotated mean is the mean of the rotated vectors.
    """

    def __init__(
        self,
        context: RecomputeContext,
        pieces: BlockPartition,
        gather: Gather,
        sidecars: Sequence[Sidecar],
        biased: bool,
    ) -> None:
        super().__init__(context, pieces, gather, 0)
        self._sidecars = sidecars
        self._biased = biased

    def _local_queries(self, layer: int, query: Tensor) -> Tensor | None:
        if not self._biased:
            return None
        means = torch.stack([one.local_query[layer] for one in self._sidecars], 1).to(query)
        return self._placed(means, layer, self._starts()).transpose(0, 1)

    def _score(self, layer: int, vectors: Tensor) -> None:
        parts = []
        for one, start, own in zip(self._sidecars, self._starts(), vectors, strict=True):
            means = one.mean_keys[layer].to(vectors)
            parts.append(_products(self._placed(means, layer, start.expand(means.shape[1])), own))
        self.blocks.append(torch.cat([part[:-1] for part in parts]))
        self.anchors.append(torch.stack([part[-1] for part in parts]))

    def _starts(self) -> Tensor:
        """Return the position of each document's first token."""
        return self._context.positions[list(self._context.chunk_starts)]

    def _placed(self, vectors: Tensor, layer: int, positions: Tensor) -> Tensor:
        return self._context.lm.rope.rotate(vectors, layer, positions)

    def stable(self, count: int) -> Sequence[int]:
        """Return the layers of the upper half where most documents' best block is an outlier (A.2).

        Among equals the last layers are returned.
        """
        votes = torch.stack([one.stable.cpu() for one in self._sidecars]).sum(0).tolist()
        upper = range(min(len(votes) // 2, len(votes) - count), len(votes))
        return sorted(sorted(upper, key=lambda layer: (votes[layer], layer))[-count:])

    def _share(self, layer: int, chunk: int, scores: Tensor) -> float:
        one = self._sidecars[chunk]
        low, high = (float(scores[int(block[layer])]) for block in (one.least, one.most))
        return top_share(low, high, float(self.anchors[layer][chunk]))

    def outliers(self, stable: Sequence[int]) -> Tensor:
        """Return the slots of the tokens that are outliers in any stable layer of their own document (A.1)."""
        marked = [one.outliers.cpu()[list(stable)].any(0) for one in self._sidecars]
        found = [start + mark.nonzero()[:, 0] for mark, start in zip(marked, self._context.chunk_starts, strict=True)]
        return torch.cat(found).to(self._context.lm.device)


def _products(keys: Tensor, vector: Tensor) -> Tensor:
    """Score each key, [num_kv_heads, num_keys, head_dim], with a query vector, [num_heads, head_dim]: [num_keys]."""
    # All query heads of a KV head meet the same key, so the sum of their products is the product with their sum.
    folded = vector.view(keys.shape[0], -1, vector.shape[1]).sum(1)
    return (keys @ folded[:, :, None]).sum((0, 2))


def _means(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the mean of each group along the first dimension; 0 for a group without members."""
    sums = values.new_zeros(num_groups, *values.shape[1:]).index_add_(0, group, values)
    counts = torch.bincount(group, minlength=num_groups).clamp_min(1)
    return sums / counts.view(-1, *[1] * (values.dim() - 1))
