"""SamKV: keeps a few blocks of every chunk, chosen layer by layer, and runs some of their tokens again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.fusion.recompute import RecomputeContext
from ragcache.lazy_torch import Tensor, torch
from ragcache.models.card import ModelCard
from ragcache.prompt import Prompt
from ragcache_papers.gather import Gather, Held
from ragcache_papers.samkv_selection import BlockPartition, SidecarSurvey, Survey
from ragcache_papers.samkv_sidecar import Sidecar, Sizes, SurveyedBlock

if TYPE_CHECKING:
    from ragcache.kv.block import KVBlock
    from ragcache.kv.fused_cache import FusedCache
    from ragcache.models.layerwise import LayerPoint

RECOMPUTE = ("none", "outliers", "all")
UPDATES = ("overwrite", "fusion")
NEVER_SEEN = 2**63 - 1  # int64's largest: a position after every query


@dataclass(frozen=True)
class SamKV(FusionMethod):
    """Sparse Attention across Multiple-context KV Cache.

    1. The suffix runs over the initial and local blocks of all chunks. Its mean query in each layer is the generic
       query vector; each document's own adds the part that other documents' local queries share with it (eq. 1).
    2. Block scores give each document the share of middle blocks that surpass its anchor (eq. 2), averaged over the
       stable layers (eq. 3). In each layer the best are compared across documents, and 1/D of these stay.
    3. Initial and local tokens and outliers of the kept middle run again over the kept tokens. A token that a layer
       does not keep but a higher layer needs is padded there with its old KV, which is removed afterwards.
    4. The suffix runs over the result.

    Where the paper leaves a choice, or needs something that a KV block does not hold:

    - Blocks of a store with `codec="samkv"` have sidecars (`samkv_sidecar`): mean keys, local queries, and statistics
      of their own attention (appendix A). All other blocks hold no queries and no attention. Local queries are then
      computed in the generic pass, from the same composite cache; every key is read for its score; the greatest and the
      least middle block (eq. 2) are those with the greatest and the least score, and outliers are tokens by score, 3
      sigma above their chunk's middle (PauTa).
    - Inner products are made comparable across documents by giving query vectors length 1.
    - "The total block count divided by the number of contexts" counts the blocks that Top-P retrieved.
    - theta of eq. 4 is a single cosine per document and layer, over the tokens that run again, for keys and values
      apart. By token it falls to -.3 for some on a real model, where the paper reports about .9 (docs/methods.md).
    - A lone chunk is kept whole: there are no other contexts.

    block_size:     tokens per block. The paper's 64 suits documents of 2,000 tokens: with passages of 500, the 3 blocks
                    that are always kept would be 38 % of a passage
    initial_blocks: kept at each chunk's beginning, at least 1
    local_blocks:   kept at each chunk's end, at least 1
    stable_layers:  N*, this many of the last layers, or, with sidecars, of the most stable layers of the upper half
                    (A.2); None: an eighth of all layers, as the paper found for Llama 3.1
    top_p:          share of each document's middle blocks, instead of eq. 2 and 3; 0 keeps no middle, 1 all of it
    personalized_bias: add the bias of eq. 1
    cross_filter:   compare across documents and keep 1/D
    recompute:      "none", "outliers" (with the initial and local tokens) or "all" that is kept
    update:         "overwrite" old KV by the new, or "fusion" of both (eq. 4)

    top_p=1, cross_filter=False keeps everything: with recompute="none" it is `reposition`, with recompute="all" and
    update="overwrite" full prefill.
    """

    block_size: int = 16
    initial_blocks: int = 1
    local_blocks: int = 2
    stable_layers: int | None = None
    top_p: float | None = None
    personalized_bias: bool = True
    cross_filter: bool = True
    recompute: str = "outliers"
    update: str = "fusion"

    name: ClassVar[str] = "samkv"
    paper: ClassVar[str] = "SamKV (Sparse Attention across Multiple-context KV Cache)"
    summary: ClassVar[str] = (
        "keeps the blocks that matter to the question and runs some of their tokens again; "
        "on a GPU it saves memory, no time"
    )

    def __post_init__(self) -> None:
        for name in ("block_size", "initial_blocks", "local_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; choose at least 1")
        if self.stable_layers is not None and self.stable_layers < 1:
            raise ConfigError(f"stable_layers is {self.stable_layers}; choose at least 1 of the last layers")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; choose a share from 0 to 1, or None for the paper's own")
        for name, known in (("recompute", RECOMPUTE), ("update", UPDATES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(known)}")

    def check(self, lm: ModelCard, prompt: Prompt) -> None:
        super().check(lm, prompt)
        if self.stable_layers is not None and self.stable_layers > lm.num_layers:
            raise ConfigError(f"stable_layers is {self.stable_layers} and {lm.name} has {lm.num_layers} layers")

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        if len(request.blocks) < 2:
            return super().prefill(request)
        context, gather = RecomputeContext.of(request), Gather(request)
        sizes = Sizes(self.block_size, self.initial_blocks, self.local_blocks)
        pieces = BlockPartition.of(context, sizes)
        survey, held, surveyed = self._survey(request, context, pieces, gather, sidecars_of(request.blocks, sizes))
        stable = survey.stable(self.stable_layers or -(-context.lm.shape.num_layers // 8))
        kept = self._kept(context, pieces, survey, stable)
        again = self._again(context, pieces, survey, kept, stable)
        done = _finish(request, context, gather, held, kept, again, self.update == "fusion")
        held.cache.release()
        computed = tuple(a + b for a, b in zip(surveyed, done.computed_tokens, strict=True))
        return replace(done, computed_tokens=computed)

    def _survey(
        self,
        request: PrefillRequest,
        context: RecomputeContext,
        pieces: BlockPartition,
        gather: Gather,
        sidecars: Sequence[Sidecar] | None,
    ) -> tuple[Survey, Held, tuple[int, ...]]:
        """Run the suffix, and without sidecars the local tokens for their queries, over the composite cache (section
        3.1).

        Returns the scores, the composite cache and the tokens that ran in each layer.
        """
        from ragcache.models.attention import observing

        composite = torch.cat([gather.slots[: context.prefix_tokens], pieces.anchors])
        rows = pieces.local if self.personalized_bias and sidecars is None else pieces.local[:0]
        text = context.text_slots()

        def place(cache: FusedCache, layer: int) -> None:
            gather.place(cache, layer, composite)
            cache.reserve(layer, context.positions[text])
            _reserve_spare(cache, layer)

        if sidecars is None:
            survey = Survey(context, pieces, gather, rows.shape[0])
        else:
            survey = SidecarSurvey(context, pieces, gather, sidecars, self.personalized_bias)
        count = composite.shape[0] + text.shape[0]
        # Local tokens run for their queries alone: their new KV goes where nothing sees it.
        slots = torch.cat([torch.full_like(rows, count), torch.arange(composite.shape[0], count, device=rows.device)])
        tokens = torch.cat([rows, text])
        cache = request.new_cache(place, count + 1)
        with observing(survey):
            ran = request.run(cache, context.ids[tokens], context.positions[tokens], slots=slots).computed_tokens
        return survey, Held(cache, composite), ran

    def _kept(self, context: RecomputeContext, pieces: BlockPartition, survey: Survey, stable: Sequence[int]) -> Tensor:
        """Return the tokens that each layer keeps: bool [num_layers, context_tokens]."""
        shares = survey.shares(stable)
        if self.top_p is not None:
            shares = [self.top_p] * len(shares)
        layers = context.lm.shape.num_layers
        kept = torch.zeros(layers, context.num_tokens, dtype=torch.bool, device=context.lm.device)
        kept[:, : context.prefix_tokens] = True
        kept[:, pieces.anchors] = True
        for layer in range(layers):
            chosen = survey.select(layer, shares, self.cross_filter)
            kept[layer, pieces.middle[torch.isin(pieces.middle_block, chosen)]] = True
        return kept

    def _again(
        self, context: RecomputeContext, pieces: BlockPartition, survey: Survey, kept: Tensor, stable: Sequence[int]
    ) -> Tensor:
        """Return the tokens that run again in the layers that keep them (section 3.3): bool [context_tokens]."""
        again = kept.any(0)
        again[: context.prefix_tokens] = False
        if self.recompute == "none":
            again[:] = False
        elif self.recompute == "outliers":
            wanted = torch.cat([pieces.anchors, survey.outliers(stable)])
            again &= torch.zeros_like(again).index_fill_(0, wanted, True)
        return again


def sidecars_of(blocks: Sequence[KVBlock], sizes: Sizes) -> list[Sidecar] | None:
    """Return the blocks' sidecars; None if any block has no sidecar, or was cut in another way."""
    found = [block.sidecar for block in blocks if isinstance(block, SurveyedBlock)]
    wanted = [sizes.block_size, sizes.initial_blocks, sizes.local_blocks]
    fits = len(found) == len(blocks) and all(one.sizes.tolist() == wanted for one in found)
    return found if fits else None


def _finish(
    request: PrefillRequest,
    context: RecomputeContext,
    gather: Gather,
    held: Held,
    kept: Tensor,
    again: Tensor,
    fusion: bool,
) -> PrefillOutput:
    """Pad, recompute, remove the padding (figure 5), and run the suffix."""
    # A token that runs again in layer n needs its output of all layers below, and none above its last such layer.
    needed = (kept.flip(0).cumsum(0).flip(0) > 0) & again
    entries = kept | needed

    def place(cache: FusedCache, layer: int) -> None:
        gather.place(cache, layer, entries[layer].nonzero()[:, 0], held)
        if bool(again.any()):
            _reserve_spare(cache, layer)

    count = int(entries.sum(1).max()) + context.text_slots().shape[0] + 1
    cache = request.new_cache(place, count + request.reserve_tokens)
    if bool(again.any()):
        with request.running(cache):
            _recompute(context, cache, kept, needed, entries, fusion)
            cache.merge = None
    return request.run(cache)


def _recompute(
    context: RecomputeContext, cache: FusedCache, kept: Tensor, needed: Tensor, entries: Tensor, fusion: bool
) -> None:
    tokens = needed[0].nonzero()[:, 0]
    documents = torch.bucketize(tokens, torch.tensor(context.chunk_starts, device=tokens.device), right=True)
    slots = []
    for keeps, holds in zip(kept, entries, strict=True):
        rank, spare = holds.cumsum(0) - 1, holds.sum()
        slots.append(torch.where(keeps[tokens], rank[tokens], spare))

    def before_layer(point: LayerPoint) -> Tensor | None:
        rows = needed[point.layer, tokens].nonzero()[:, 0]
        if fusion:
            # Padding is written to the spare entry, as document 0; documents are numbered from 1.
            cache.merge = partial(blend, documents=(documents * kept[point.layer, tokens])[rows])
        return None if rows.shape == point.rows.shape else rows

    positions = context.positions[tokens]
    context.lm.run(context.ids[tokens], positions, cache, slots=slots, before_layer=before_layer)
    for layer, (keeps, holds) in enumerate(zip(kept, entries, strict=True)):
        cache.retain(layer, keeps[holds].nonzero()[:, 0])


def blend(old: Tensor, new: Tensor, documents: Tensor) -> Tensor:
    """Return theta new + (1 - theta) old, with theta the cosine of all of a document's old and new numbers (eq. 4).

    old, new: [1, num_kv_heads, num_tokens, head_dim]; documents: int64 [num_tokens], the number of a token's document
    """
    before, after = (part[0].float().transpose(0, 1).flatten(1) for part in (old, new))
    products = torch.stack([(a * b).sum(1) for a, b in ((before, after), (before, before), (after, after))], 1)
    dot, *squares = products.new_zeros(int(documents.max()) + 1, 3).index_add_(0, documents, products).unbind(1)
    theta = (dot / (squares[0] * squares[1]).sqrt().clamp_min(torch.finfo(dot.dtype).tiny))[documents, None]
    return torch.lerp(old.float(), new.float(), theta).to(new.dtype)


def _reserve_spare(cache: FusedCache, layer: int) -> None:
    """Reserve an entry that no query sees, for unwanted keys and values. It must not hold NaN, even though masked."""
    keys, values = cache.reserve(layer, torch.tensor([NEVER_SEEN]))
    keys.zero_()
    values.zero_()
