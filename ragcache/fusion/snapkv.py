"""Decode eviction: after the first token, only the passages' tokens that the question attended to are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ragcache.errors import ConfigError, check_choice, is_whole
from ragcache.kv.fused_cache import FusedCache
from ragcache.models.attention import Attended

POOLINGS = ("avg", "max")


@dataclass(frozen=True)
class SnapKV:
    """SnapKV's choice of tokens (arXiv 2404.14469), made when A3's extension makes it: once the first token is known.

    The last rows of the suffix vote: their attention to each passage token, summed over rows and over the query heads
    of a KV head, then pooled over neighbouring tokens, ranks the tokens. In every layer each KV head keeps its own best
    tokens. As in A3, the prefix and everything that ran after the passages (link tokens, suffix) are kept whole.

    Choices made here: pooling covers only passages' tokens, and at the ends only those that exist, because the prefix,
    which draws much attention and is kept anyway, must not raise the tokens next to it. Of tokens with equal votes the
    first are kept: in a sliding layer, tokens outside the window get no votes.

    budget:  passages' tokens that each KV head of each layer keeps
    window:  rows of the suffix that vote; None: all rows. Their attention weights are computed a second time and held
             in memory together, a layer at a time: a small window makes the vote of a long suffix cheap
    kernel:  neighbouring tokens that are pooled, an odd number; 1: no pooling. The authors' program uses 5 with "avg"
    pooling: "avg" or "max" of the neighbours' votes
    """

    budget: int
    window: int | None = None
    kernel: int = 5
    pooling: str = "avg"

    def __post_init__(self) -> None:
        if not is_whole(self.budget) or self.budget < 1:
            raise ConfigError(
                f"the eviction budget is {self.budget!r}; give the tokens that each layer and KV head keeps, at least 1"
            )
        if self.window is not None and (not is_whole(self.window) or self.window < 1):
            raise ConfigError(f"the observation window is {self.window!r}; give rows of the suffix, at least 1")
        if not is_whole(self.kernel) or self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"the pooling kernel is {self.kernel!r}; give an odd number of tokens, 1 for no pooling")
        check_choice("pooling", self.pooling, POOLINGS)

    @classmethod
    def of(cls, budget: SnapKV | int) -> SnapKV:
        """Return the choice; a number is its budget. Raises ConfigError for any other value."""
        return budget if isinstance(budget, SnapKV) else cls(budget)

    def pooled(self, votes: Tensor) -> Tensor:
        """Pool the votes over neighbouring tokens: float32 [num_kv_heads, num_tokens], same shape."""
        if self.kernel == 1:
            return votes
        pad = self.kernel // 2
        if self.pooling == "max":
            return nn.functional.max_pool1d(votes, self.kernel, stride=1, padding=pad)
        return nn.functional.avg_pool1d(votes, self.kernel, stride=1, padding=pad, count_include_pad=False)


class SnapKVObserver:
    """Collects the votes during a method's passes (`attention.observing`), and evicts.

    before: entries that every layer holds before the chunks' tokens
    behind: entries that every layer holds after the chunks' tokens
    suffix: rows of the suffix, the last of these entries
    """

    def __init__(self, choice: SnapKV, before: int, behind: int, suffix: int) -> None:
        self.choice = choice
        self._before, self._behind = before, behind
        self._voters = min(suffix, choice.window or suffix)
        self._votes: dict[int, Tensor] = {}
        self._last: dict[int, int] = {}

    def __call__(self, attended: Attended) -> None:
        """Record the votes of the suffix's rows, which come last; earlier passes and tokens that catch up have none."""
        last = int(attended.positions[-1])
        if last < self._last.get(attended.layer, 0):
            return
        self._last[attended.layer] = last
        weights = attended.weights(min(self._voters, attended.query.shape[2]))
        self._votes[attended.layer] = weights.sum((1, 2))

    @torch.inference_mode()
    def evict(self, cache: FusedCache, reserve_tokens: int) -> tuple[int, ...]:
        """Drop the tokens that lost the vote, and return large buffers to the pool.

        Returns how many tokens each head holds now, by layer.
        """
        before = tuple(cache.lengths)
        for layer, votes in self._votes.items():
            end = votes.shape[1] - self._behind
            if end - self._before > self.choice.budget:
                cache.retain(layer, self._most_voted(votes, end))
        if tuple(cache.lengths) != before:
            cache.shrink(reserve_tokens)
        return tuple(cache.lengths)

    def _most_voted(self, votes: Tensor, end: int) -> Tensor:
        """Return the entries that each head keeps: int64 [num_kv_heads, num_kept], ascending."""
        pooled = self.choice.pooled(votes[:, self._before : end])
        order = torch.sort(pooled, dim=1, descending=True, stable=True).indices
        best = order[:, : self.choice.budget].sort(dim=1).values + self._before
        always = torch.arange(votes.shape[1], device=votes.device).expand(votes.shape[0], -1)
        return torch.cat([always[:, : self._before], best, always[:, end:]], dim=1)
