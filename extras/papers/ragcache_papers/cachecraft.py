"""Cache-Craft: how much of a chunk runs again follows from how much it leans on the chunks before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from numbers import Real
from operator import methodcaller
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import ConfigError, is_whole
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.fusion.recompute import RecomputeContext, Running, highest, open_cache, rerun
from ragcache.lazy_torch import torch
from ragcache_papers.anchors import Anchor, AnchorPool, cut, ids_digest

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.kv.fused_cache import FusedCache

SCORE_LAYER = 1
MOST = 2.0  # no chunk's impact is below a half: all of its tokens run


@dataclass(frozen=True, eq=False)
class Variant(Anchor):
    """A chunk's KV as a prompt left it, with its repaired tokens.

    before: digests of the chunks before it in that prompt, in order
    about:  attention that it gave to each earlier chunk, float32 [chunks]
    """

    before: tuple[bytes, ...]

    def overlap(self, before: Sequence[bytes]) -> float:
        """Return how much of its earlier context precedes it now, and in the same order (equations 6 to 8): 0 to 1."""
        rank_of = {name: rank for rank, name in enumerate(before)}
        ranks = [rank_of.get(name, -1) for name in self.before]
        shared = torch.tensor([rank >= 0 for rank in ranks])
        kept = _share(self.about[shared], self.about)
        return kept * (1 - _disorder([rank for rank in ranks if rank >= 0]))


@dataclass(frozen=True)
class CacheCraft(FusionMethod):
    """Per-chunk shares by context impact (Cache-Craft, equations 3, 4, 6 to 12 and 14).

    inter(i, j) is the attention that the tokens of chunk i give to an earlier chunk j, intra(i) the attention to their
    own. With a = sum over j of inter(i, j) / (|i| |j|) and b = intra(i) / |i|^2, the Cache Context Impact is
    CCI = 1 / (1 + exp(-a / b)), and alpha * CCI is the share of its tokens that run again (Cache Fix Overhead, of a
    block encoded after none of these chunks): the tokens that give most attention to earlier chunks.

    The paper takes a and b from the pass that made the KV, over all layers. A block holds no attention, and a block
    that was encoded alone gave none to others, so they are measured in this prompt: layer 0 runs in full, as in
    `cacheblend`, and layer 1's attention, which is then full prefill's own, decides. The first chunk has no earlier
    chunks and keeps its KV. The equations were read in public re-implementations that quote them, not in the paper
    itself.

    With `max_variants`, each chunk's KV as a prompt left it is kept as a variant of its block. For a chunk of a later
    prompt the variant with the largest overlap is placed: beta is the share of the attention that it gave to chunks
    that precede it again, gamma the share of their pairs in another order (Kendall's tau distance), and alpha * CCI *
    (1 - beta * (1 - gamma)) of its tokens run. A chunk that the variant never saw lowers beta as well, by its share of
    the attention in this prompt. After the same chunks as before nothing runs again.

    alpha:        share of a chunk that runs again if the chunk depends on others alone; 0 is `reposition`. A chunk that
                  depends on no others has half that share, and 2 runs every chunk but the first
    max_variants: of a single chunk, besides its block; 0: only its block
    pool_bytes:   of all variants, in host memory; the least recently used are evicted

    pool: the variants. They last as long as this object and their scope (`PrefillRequest.scope`).
    """

    alpha: float = 0.3
    max_variants: int = 0
    pool_bytes: int = 1 << 30

    name: ClassVar[str] = "cachecraft"
    paper: ClassVar[str] = "Cache-Craft (arXiv 2502.15734)"
    summary: ClassVar[str] = "runs more of a chunk again the more it attends to the chunks before it"

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not 0 <= self.alpha <= MOST:
            raise ConfigError(f"alpha is {self.alpha!r}; choose a number from 0 (nothing runs again) to {MOST:g}")
        for name in ("max_variants", "pool_bytes"):
            value = getattr(self, name)
            if not is_whole(value) or value < 0:
                raise ConfigError(f"{name} is {value!r}; choose a whole number, 0 or more")
        _ = self.pool  # made before threads share this object

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.max_variants > 0

    @cached_property
    def pool(self) -> AnchorPool[Variant]:
        return AnchorPool(self.pool_bytes, self.max_variants)

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        context = RecomputeContext.of(request)
        if not self.alpha or len(context.chunks) < 2 or request.lm.shape.num_layers <= SCORE_LAYER:
            return super().prefill(request)
        names = [ids_digest(piece.ids) for piece in request.layout.placed(request.known)]
        found = self._nearest(request, names)
        blocks = [block if near is None else near.block for block, near in zip(request.blocks, found, strict=True)]
        request = replace(request, blocks=blocks)
        new = [rank for rank, near in enumerate(found) if rank and not (near and near.before == tuple(names[:rank]))]
        if not new:
            return super().prefill(request)
        given: list[Tensor] = []

        def choose(running: Running) -> Tensor | None:
            if running.layer != SCORE_LAYER:
                return None
            given.extend(torch.split(_given(running, context), list(context.chunk_tokens)))
            taken = (self._chosen(rank, given[rank], context, names, near) for rank, near in enumerate(found))
            return torch.cat(list(taken))

        done = rerun(request, context, open_cache(request, context), context.chunk_slots(), choose)
        if self.remembers:
            with torch.inference_mode(), request.placing():
                for rank in new:
                    self._keep(request, context, done.cache, names[: rank + 1], given[rank])
        return done

    def _nearest(self, request: PrefillRequest, names: Sequence[bytes]) -> list[Variant | None]:
        """Return the variant of each chunk with the largest overlap; None: its block."""
        scope, found = request.scope or self.pool.scope, list[Variant | None]()
        for rank, name in enumerate(names):
            known = self.pool.of(scope, _passage(request, name)) if rank and self.remembers else []
            overlap = methodcaller("overlap", names[:rank])
            near = max(filter(overlap, known), key=overlap, default=None)
            if near is not None:
                self.pool.put(scope, near)
            found.append(near)
        return found

    def _chosen(
        self, rank: int, given: Tensor, context: RecomputeContext, names: Sequence[bytes], near: Variant | None
    ) -> Tensor:
        """Return the slots of the chunk's tokens that run: int64, ascending. given: see `_given`"""
        count, sizes = given.shape[0], torch.tensor(context.chunk_tokens[:rank], device=given.device)
        inter, intra = given[:, :rank], given[:, rank]
        a, b = (inter.sum(0) / (count * sizes)).sum(), intra.sum() / count**2
        share = self.alpha * float(torch.sigmoid(a / b)) if rank else 0.0
        if near is not None:
            seen = torch.tensor([name in near.before for name in names[:rank]], device=given.device)
            share *= 1 - near.overlap(names[:rank]) * _share(inter[:, seen], inter)
        return context.chunk_starts[rank] + highest(inter.sum(1), min(count, math.ceil(share * count)))

    def _keep(
        self,
        request: PrefillRequest,
        context: RecomputeContext,
        cache: FusedCache,
        names: Sequence[bytes],
        given: Tensor,
    ) -> None:
        """Keep what this prompt made of the last of these chunks. given: see `_given`"""
        *before, name = names
        start = context.chunk_starts[len(before)]
        block = cut(request.lm, cache, start, int(context.positions[start]), given.shape[0])
        about, behind = given[:, : len(before)].sum(0).cpu(), sha256(b"".join(before)).digest()
        self.pool.put(
            request.scope or self.pool.scope, Variant(_passage(request, name), behind, about, block, tuple(before))
        )


def _passage(request: PrefillRequest, name: bytes) -> bytes:
    """Return a digest of a chunk after this prompt's prefix."""
    prefix = request.layout.ids[: request.layout.passages[0].start]
    return sha256(request.lm.fingerprint.encode() + ids_digest(prefix) + name).digest()


def _share(part: Tensor, whole: Tensor) -> float:
    """Return the part's sum over the whole's; 0 if the whole's sum is 0."""
    total = float(whole.sum())
    return float(part.sum()) / total if total else 0.0


def _disorder(ranks: Sequence[int]) -> float:
    """Share of the pairs whose order is another: Kendall's tau distance, 0 to 1."""
    order = torch.tensor(ranks)
    pairs = len(ranks) * (len(ranks) - 1) // 2
    return int((order[:, None] > order).triu(1).sum()) / pairs if pairs else 0.0


def _given(running: Running, context: RecomputeContext) -> Tensor:
    """Return the attention that each chunk token gives to each chunk in this layer: float32 [chunk tokens, chunks].

    It is a share of all attention that the token gives to the context before it.
    """
    projected, (placed, _), count = running.probe(), running.placed(), running.slots.shape[0]
    asking = projected._replace(query=projected.query[:, :, :count], positions=projected.positions[:count])
    keys = torch.cat([placed[:, :, : context.prefix_tokens], projected.key[:, :, :count]], dim=2)
    sizes = [context.prefix_tokens, *context.chunk_tokens]
    groups = torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)], device=keys.device)
    parts = asking.weights(keys, context.positions[: context.num_tokens])
    return torch.cat([rows.new_zeros(len(rows), len(sizes)).index_add_(1, groups, rows) for rows in parts])[:, 1:]
