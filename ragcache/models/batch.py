"""Tokens of several requests in a single forward pass, each over its own cache.

The rows of all requests follow each other in a single sequence, so every matrix product covers all requests and the
weights are read only once. Each request has its own positions. Only attention knows the boundaries between requests: a
request's rows see that request's cache, by the same code as when they run alone. Nothing is padded and no cache is
copied, so lengths, windows, sinks and changed scores may differ from request to request.

As Orca's selective batching (Yu et al., OSDI 2022), with SARATHI's pieces of long prompts (Agrawal et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ragcache.kv.fused_cache import CacheMark, FusedCache
from ragcache.models.attention import CURRENT, BatchedPass, FusedPass
from ragcache.runtime import during


@dataclass(eq=False)
class ForwardRequest:
    """Tokens to run over a caller's cache.

    ids, positions: int64 [num_tokens]
    ordered:   they come after everything in the cache; only such runs can be cut into pieces
    done:      number of tokens that have run
    """

    ids: Tensor
    positions: Tensor
    cache: FusedCache
    ordered: bool
    done: int = 0

    @property
    def left(self) -> int:
        return self.ids.shape[0] - self.done


class ScheduledTokens(NamedTuple):
    """The next tokens of a run: `num_tokens` from `start` on. `mark`: the state of its cache before them."""

    run: ForwardRequest
    start: int
    num_tokens: int
    mark: CacheMark

    @classmethod
    def next(cls, run: ForwardRequest, num_tokens: int) -> ScheduledTokens:
        return cls(run, run.done, num_tokens, run.cache.mark())

    @property
    def ids(self) -> Tensor:
        return self.run.ids[self.start : self.start + self.num_tokens]

    @property
    def positions(self) -> Tensor:
        return self.run.positions[self.start : self.start + self.num_tokens]

    def begin(self) -> FusedPass:
        """Announce the tokens to the cache."""
        positions = self.positions
        self.run.cache.begin(positions)
        return FusedPass(self.run.cache, positions, self.run.ordered)

    def end(self) -> None:
        self.run.done = self.start + self.num_tokens

    def undo(self) -> None:
        """Restore the cache's earlier contents after a failure."""
        self.run.cache.rewind(self.mark)


class JointCache(Cache):  # type: ignore[misc]
    """A cache that passes each request's new keys and values to the request's own cache."""

    def __init__(self, pieces: Sequence[ScheduledTokens]) -> None:
        super().__init__(layers=[])
        self._caches = [piece.run.cache for piece in pieces]
        self._lengths = [piece.num_tokens for piece in pieces]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the arguments unchanged: `attention` reads each request's contents from its own cache."""
        split = zip(torch.split(key_states, self._lengths, 2), torch.split(value_states, self._lengths, 2), strict=True)
        for cache, (keys, values) in zip(self._caches, split, strict=True):
            cache.update(keys, values, layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.inference_mode()
def run_pieces(model: PreTrainedModel, pieces: Sequence[ScheduledTokens]) -> list[Tensor]:
    """Run a forward pass over all pieces and return the logits of each piece's last token: float32 [vocab_size].

    A single piece runs as it would without this module.
    """
    passes = [piece.begin() for piece in pieces]
    lengths = [piece.num_tokens for piece in pieces]
    ids = torch.cat([piece.ids for piece in pieces])
    positions = torch.cat([member.positions for member in passes])
    alone = len(pieces) == 1
    with during(CURRENT, passes[0] if alone else BatchedPass(passes, lengths)):
        out = model(
            input_ids=ids[None],
            position_ids=positions[None],
            past_key_values=pieces[0].run.cache if alone else JointCache(pieces),
            use_cache=True,
            logits_to_keep=torch.tensor(lengths, device=ids.device).cumsum(0) - 1,
        )
    return list(out.logits[0].float().unbind(0))
