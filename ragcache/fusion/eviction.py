"""Decode eviction: after the first token, keep of the passages only what the question attended to."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache.errors import ConfigError

POOLINGS = ("avg", "max")


@dataclass(frozen=True)
class SnapKV:
    """SnapKV's choice (arXiv 2404.14469), in the place that A3's extension gives it: after the first token.

    The last rows of the prefill vote: their attention to each context token, summed over the rows and over the query
    heads of a KV head, then pooled over neighbours, ranks the tokens. In every layer each KV head keeps its own best.
    The prefix and all that ran behind the passages (the suffix) are kept beside them.

    budget:  context tokens that each KV head of each layer keeps
    window:  rows of the suffix that vote; None: all of them
    kernel:  tokens that are pooled around each token, an odd number; 1: none
    pooling: "avg" or "max" of them
    """

    budget: int
    window: int | None = None
    kernel: int = 7
    pooling: str = "avg"

    def __post_init__(self) -> None:
        if not _is_whole(self.budget) or self.budget < 1:
            raise ConfigError(f"the eviction budget is {self.budget!r}; give tokens a layer and KV head, at least 1")
        if self.window is not None and (not _is_whole(self.window) or self.window < 1):
            raise ConfigError(f"the observation window is {self.window!r}; give rows of the suffix, at least 1")
        if not _is_whole(self.kernel) or self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"the pooling kernel is {self.kernel!r}; give an odd number of tokens, 1 for no pooling")
        if self.pooling not in POOLINGS:
            raise ConfigError(f"pooling {self.pooling!r} is unknown; choose one of {', '.join(POOLINGS)}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
