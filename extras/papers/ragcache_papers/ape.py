"""APE: chunks side by side after a shared prefix, with their attention sharpened and weighed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.layout import AddedTokens
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.lazy_torch import Tensor, torch
from ragcache.models.card import ModelCard

if TYPE_CHECKING:
    from ragcache.kv.fused_cache import Adjust

UNSEEN = -1e30  # lower scores are those of masked keys: no visible key has a score as low


@dataclass(frozen=True)
class Ape(FusionMethod):
    """Adaptive Parallel Encoding (section 4; the formula is that of the authors' code).

    Every chunk is encoded after the shared prefix, which is the only attention sink, and keeps those positions; the
    suffix follows the longest chunk. With s the scores of suffix or answer token over the chunks' keys and o
    those over all other keys (prefix, suffix, answer), attention within the chunks is softmax(s / T), and the chunks
    together weigh exp(S T LSE(s / T)) against the others' sum of exp(o). As a single softmax that is

        softmax([o ; s / T + (S T - 1) LSE(s / T)])

    T < 1 sharpens attention among the chunks' keys, of which many compete; S < 1 takes back the weight that many
    contexts gain together. The paper tunes both by task in (0, 1]; the defaults are the authors' demonstration's.
    A lone chunk is no parallel encoding and is left unchanged: after its prefix it is already exact.

    temperature: T; 1 and scale 1 give plain attention over overlapping positions
    scale:       S
    """

    temperature: float = 0.9
    scale: float = 0.9

    name: ClassVar[str] = "ape"
    paper: ClassVar[str] = "APE (arXiv 2502.05431)"
    summary: ClassVar[str] = "reads chunks side by side behind one prefix, their attention sharpened and weighed"
    recipes: ClassVar[tuple[str, ...]] = ("prefix", "primer")
    takes_sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("scale", self.scale)):
            if not (isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; choose a number above 0, 1 for plain attention")

    def additions(self, lm: ModelCard) -> AddedTokens:
        return replace(super().additions(lm), positions="parallel")

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        passages = request.layout.passages
        cache = request.new_cache()
        if len(passages) > 1 and (self.temperature, self.scale) != (1, 1):
            cache.adjust = self._adjustment(passages[0].start, max(passage.end for passage in passages))
        return request.run(cache)

    def _adjustment(self, chunks_from: int, suffix_from: int) -> Adjust:
        temperature, weight = self.temperature, self.scale * self.temperature

        def adjust(scores: Tensor, positions: Tensor) -> Tensor:
            """Return adjusted scores.

            scores: [batch, num_kv_heads, groups, num_tokens, length]; positions: [(num_kv_heads,) length]
            """
            of_chunks = ((positions >= chunks_from) & (positions < suffix_from)).unsqueeze(-2).unsqueeze(-2)
            cooled = scores / temperature
            total = cooled.masked_fill(~of_chunks, -torch.inf).logsumexp(-1, keepdim=True)
            # A layer with a sliding window may see no chunk at all, and then has nothing to weigh.
            shift = torch.where(total > UNSEEN, (weight - 1) * total, 0.0)
            return torch.where(of_chunks, cooled + shift, scores)

        return adjust
