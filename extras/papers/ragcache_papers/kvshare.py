"""KVShare: the tokens whose wrong values weigh most run again, before the answer and while it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ragcache.fusion import recompute
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.lazy_torch import torch
from ragcache_papers.gather import attention_received

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.kv.fused_cache import FusedCache
    from ragcache.models.language_model import LanguageModel

CHECK_LAYER = 1


@dataclass(frozen=True)
class KVShare(FusionMethod):
    """Dual-stage high deviation (KVShare).

    A token's impact is the attention that it gets times the L1 norm of its value's error; the tokens of highest impact
    run again.

    1. Prefill. Layer 0 runs in full, as in `cacheblend`; layer 1 then projects every chunk token. The attention that a
       token gets is layer 1's, which is full prefill's own, summed over all rows of chunks and suffix and over the
       heads; the error is its new value less the block's.
    2. Decoding. With every token of the answer, the chunk tokens with the highest impact on it run again: attention
       changes as the answer is written, and a token not worth running for the question may be worth it for the answer.
       The impact uses the answer token's attention in layer 1, and the errors measured in prefill.

    Only values are compared: the paper finds that keys name the same tokens in 80 to 90 % of the cases. The layer is
    chosen here. The method was read in a public summary of the paper, not in the paper itself; rolling hashes that find
    reused text and scheduling by hit rates are no fusion and are left out.

    ratio:         share of the chunks' tokens that run again in prefill
    decode_tokens: chunk tokens that run again with each token of the answer (the paper: 3). Each step then has its own
                   pass, which is not batched with other questions' tokens. With ratio 0, 0 is `reposition`
    """

    ratio: float = 0.2
    decode_tokens: int = 3

    name: ClassVar[str] = "kvshare"
    paper: ClassVar[str] = "KVShare (arXiv 2503.16525)"
    summary: ClassVar[str] = "runs the tokens again whose wrong values weigh most, more of them with each answer token"

    def __post_init__(self) -> None:
        recompute.check_ratio(self.ratio)
        recompute.check_tokens(decode_tokens=self.decode_tokens)

    @property
    def reruns_in_answers(self) -> bool:  # type: ignore[override]
        return self.decode_tokens > 0

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        context = recompute.RecomputeContext.of(request)
        slots = context.chunk_slots()
        count = round(self.ratio * slots.shape[0])
        if request.lm.shape.num_layers <= CHECK_LAYER or not (count or self.decode_tokens) or not slots.numel():
            return super().prefill(request)
        wrong, stale = slots[:0], slots[:0]

        def choose(running: recompute.Running) -> Tensor | None:
            nonlocal wrong, stale
            if running.layer != CHECK_LAYER or count == slots.shape[0]:
                return None
            received, wrong = _measured(running, context)
            best = recompute.highest(received * wrong, count)
            stale = slots[~torch.isin(slots, slots[best])]
            return slots[best]

        cache = recompute.open_cache(request, context)
        done = recompute.rerun(request, context, cache, slots, choose)
        if self.decode_tokens and stale.numel():
            cache.step = _Repair(context, wrong, stale, self.decode_tokens)
        return done


def _measured(running: recompute.Running, context: recompute.RecomputeContext) -> tuple[Tensor, Tensor]:
    """Return the attention that each chunk token gets in this layer, and the error of its placed value.

    The error is the L1 norm of the new value less the placed, over all heads. Each is float32 [chunk tokens].
    """
    projected, (placed_keys, placed_values) = running.probe(), running.placed()
    chunks = slice(context.prefix_tokens, context.num_tokens)
    new = projected.value[0, :, : running.slots.shape[0]]
    wrong = (new.float() - placed_values[0, :, chunks].float()).abs().sum((0, 2))
    keys = torch.cat([placed_keys[:, :, : context.prefix_tokens], projected.key], dim=2)
    return attention_received(projected, keys, context.positions)[chunks], wrong


class _Repair:
    """Runs an answer's token together with the stale chunk tokens of most impact on it; see `FusedCache.step`.

    wrong: float32 [chunk tokens]; stale: slots of the tokens that have not run, int64, ascending
    """

    def __init__(self, context: recompute.RecomputeContext, wrong: Tensor, stale: Tensor, count: int) -> None:
        self._lm: LanguageModel = context.lm
        self._ids, self._positions = context.ids, context.positions
        self._first, self._wrong, self._stale, self._count = context.prefix_tokens, wrong, stale, count

    def __call__(self, cache: FusedCache, ids: Tensor, positions: Tensor) -> Tensor:
        stale = self._stale
        if not stale.numel():
            return self._lm.run(ids, positions, cache)
        own = torch.tensor(cache.lengths[:1], device=stale.device)
        for layer in range(self._lm.shape.num_layers):
            cache.reserve(layer, positions)
        slots = torch.cat([stale, own])

        def choose(running: recompute.Running) -> Tensor | None:
            if running.layer < CHECK_LAYER:
                return stale[:0]
            if running.layer > CHECK_LAYER:
                return None
            best = stale[recompute.highest(self._impact(running, cache), self._count)]
            self._stale = stale[~torch.isin(stale, best)]
            return best

        ids, positions = torch.cat([self._ids[stale], ids]), torch.cat([self._positions[stale], positions])
        return self._lm.run(
            ids, positions, cache, slots=slots, before_layer=recompute.in_rows(choose, slots, stale.shape[0])
        )

    def _impact(self, running: recompute.Running, cache: FusedCache) -> Tensor:
        """Return each stale token's impact: float32 [stale tokens]."""
        asking = running.probe()
        (keys, _), (_, _, positions) = running.placed(), cache.layer_state(running.layer)
        received = attention_received(asking, torch.cat([keys[:, :, :-1], asking.key], dim=2), positions)
        return received[self._stale] * self._wrong[self._stale - self._first]
