"""KVCOMM: a passage's KV under earlier contexts predicts its KV under a new context."""

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
from ragcache.fusion.layout import Segment
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.kv.block import KVBlock, empty_block
from ragcache.lazy_torch import torch
from ragcache_papers.anchors import Anchor, AnchorPool, cut, ids_digest

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.kv.fused_cache import FusedCache
    from ragcache.models.language_model import LanguageModel

NEAR_TOKENS = 32  # a token this far before a passage counts 1/e of the last token before it
FAR_TOKENS = 16 * NEAR_TOKENS  # all beyond counts less than float32 can tell
FEWEST_ANCHORS = 2


@dataclass(frozen=True)
class KVComm(FusionMethod):
    """Offsets that were observed under other contexts, kept in a pool, interpolated and added (KVCOMM).

    An anchor is a passage's KV as a full prefill left it after a context; its offset is the difference from the
    passage's block, keys before RoPE. For a context that was not seen,

        KV = block + sum_i w_i (anchor_i - block),  w = softmax(-d_i / (temperature * mean(d)))

    with d_i the distance between the new context and that of anchor i, and an additional term for the block itself: it
    is the passage after no context, and its offset is zero. The result is the weighted mean of the block and the
    anchors. An anchor of exactly this context is used unchanged.

    If a passage has fewer than two anchors, or the entropy of w is above `threshold` times the highest possible,
    so that none is clearly nearest, the whole prompt is read in full, and all its passages are observed.

    Details come from the authors' program, which keeps anchors of other texts in the same slot of a prompt template,
    and compares texts; here texts recur and contexts differ, so that anchors are the passage's own, and contexts
    are compared by their tokens' embeddings, the nearest weighted most.

    pool_bytes:  of the anchors, in host memory, in addition to all other memory; 0: every prompt is read in full
    max_anchors: of a single passage
    threshold:   share of the highest entropy, 0 to 1; 1: two anchors are always enough
    temperature: above 0; towards 0 the nearest anchor alone counts

    pool: the anchors. They last as long as this object and their scope (`PrefillRequest.scope`).
    """

    pool_bytes: int = 1 << 30
    max_anchors: int = 20
    threshold: float = 0.3
    temperature: float = 0.05

    name: ClassVar[str] = "kvcomm"
    paper: ClassVar[str] = "KVCOMM (arXiv 2510.12872)"
    summary: ClassVar[str] = "adds offsets that full prefills of the same passages left under other contexts"
    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("pool_bytes", 0), ("max_anchors", FEWEST_ANCHORS)):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise ConfigError(f"{name} is {value!r}; choose a whole number, {least} or more")
        if not _is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold!r}; choose a share of the entropy, a number from 0 to 1")
        if not _is_number(self.temperature) or not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature!r}; choose a number above 0")
        _ = self.pool  # made before threads share this object

    @cached_property
    def pool(self) -> AnchorPool[Anchor]:
        return AnchorPool(self.pool_bytes, self.max_anchors)

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        with torch.inference_mode(), request.placing():
            blocks = self._interpolated(request)
        if blocks is not None:
            return super().prefill(replace(request, blocks=blocks))
        done = super().prefill(replace(request, layout=replace(request.layout, separate=False), blocks=()))
        with torch.inference_mode(), request.placing():
            self._observe(request, done.cache)
        return done

    def _interpolated(self, request: PrefillRequest) -> list[KVBlock] | None:
        """Return every passage's KV under its context; None if any passage has too few anchors."""
        blocks = []
        for piece, block in zip(request.layout.passages, request.blocks, strict=True):
            found = self._under(request, piece, block)
            if found is None:
                return None
            blocks.append(found)
        return blocks

    def _under(self, request: PrefillRequest, piece: Segment, block: KVBlock) -> KVBlock | None:
        scope, before = request.scope or self.pool.scope, request.layout.ids[: piece.start]
        anchors, context = self.pool.of(scope, _passage(request.lm, piece)), ids_digest(before)
        for anchor in anchors:
            if anchor.context == context:
                self.pool.put(scope, anchor)
                return anchor.block
        if len(anchors) < FEWEST_ANCHORS:
            return None
        here = _about(request.lm, before)
        distances = torch.stack([here, *(here - anchor.about for anchor in anchors)]).norm(dim=1)
        weights = torch.softmax(-distances / (self.temperature * distances.mean()), dim=0)
        if _entropy(weights) > self.threshold:
            return None
        self.pool.put(scope, anchors[int(distances[1:].argmin())])
        return _mean(request.lm, [block, *(anchor.block for anchor in anchors)], weights.tolist())

    def _observe(self, request: PrefillRequest, cache: FusedCache) -> None:
        """Keep every passage's KV out of a cache that holds the prompt in full, by position."""
        ids, scope = request.layout.ids, request.scope or self.pool.scope
        for piece in request.layout.passages:
            before = ids[: piece.start]
            block = cut(request.lm, cache, piece.start, piece.start, len(piece.ids))
            self.pool.put(
                scope, Anchor(_passage(request.lm, piece), ids_digest(before), _about(request.lm, before), block)
            )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _passage(lm: LanguageModel, piece: Segment) -> bytes:
    return sha256(lm.fingerprint.encode() + ids_digest(piece.ids)).digest()


def _about(lm: LanguageModel, before: Sequence[int]) -> Tensor:
    """Return the feature of a context: the mean embedding of its ids, each weighed by exp(-distance / 32).

    float32 [hidden_size], on the CPU; zeros for no ids.
    """
    ids = torch.tensor(before[-FAR_TOKENS:], dtype=torch.int64, device=lm.device)
    weights = torch.softmax(torch.arange(ids.shape[0], device=lm.device) / NEAR_TOKENS, dim=0)
    found: Tensor = lm.model.get_input_embeddings()(ids).float()
    return (found * weights[:, None]).sum(0).cpu()


def _entropy(weights: Tensor) -> float:
    """Return the entropy as a share of the highest possible, that of equal weights."""
    return min(1.0, float(torch.special.entr(weights).sum()) / math.log(weights.shape[0]))


def _mean(lm: LanguageModel, blocks: Sequence[KVBlock], weights: Sequence[float]) -> KVBlock:
    """Return the weighted mean of a passage's blocks, computed in float32 on the model's device."""
    mean, by_block = empty_block(lm.shape, blocks[0].num_tokens), torch.tensor(weights, device=lm.device)
    for layer in range(lm.shape.num_layers):
        for part in (methodcaller("layer_keys", layer), methodcaller("layer_values", layer)):
            held = torch.stack([part(block).to(lm.device).float() for block in blocks])
            part(mean).copy_(torch.tensordot(by_block, held, dims=1))
    return mean
