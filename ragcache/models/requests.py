"""Requests that wait for the model and run in its passes: callers' tokens, and sequences that are decoded."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ragcache.kv.fused_cache import FusedCache
from ragcache.models.batch import ForwardRequest, ScheduledTokens
from ragcache.models.deadline import NO_LIMIT, Limit


@dataclass(eq=False)
class QueuedRequest:
    """Tokens that wait for a pass.

    alone:    runs them in a separate pass; None for a run that may share a pass
    sequence: the sequence whose next token this is; None if a caller waits for the logits
    finished: gets the logits, or the error, once the tokens have run
    """

    run: ForwardRequest
    alone: Callable[[], Tensor] | None = None
    sequence: DecodingSequence | None = None
    limit: Limit = NO_LIMIT
    finished: Future[Tensor] = field(default_factory=Future)


class ScheduledRequest(NamedTuple):
    """A request in a pass, with its tokens that run there."""

    request: QueuedRequest
    piece: ScheduledTokens


@dataclass(eq=False)
class DecodingSequence:
    """A sequence that is being decoded.

    choose:   picks a token from logits, float32 [vocab_size]
    position: of the next token; `last`: the first position that is not decoded
    eos_ids:  ids that end the sequence and are not handed out
    granted:  the first position that memory is not yet granted for; None: granted for all
    more:     called in the reader's thread: waits for memory and returns for how many tokens it was granted
    tokens:   queue to the reader: ids, then None or an exception at the end. If no memory is granted for the next
              token, the request that computes it, which the reader submits once memory is granted
    over:     whether the sequence has ended, or nothing reads it any longer
    """

    cache: FusedCache
    choose: Callable[[Tensor], int]
    position: int
    last: int
    eos_ids: Collection[int]
    limit: Limit
    granted: int | None = None
    more: Callable[[], int] | None = None
    tokens: queue.SimpleQueue[int | QueuedRequest | BaseException | None] = field(default_factory=queue.SimpleQueue)
    over: bool = False

    def advance(self, logits: Tensor) -> QueuedRequest | None:
        """Choose the next token and hand it out. Returns the request for the token after it; None at the end."""
        token = self.choose(logits)
        if token in self.eos_ids:
            self.end(None)
            return None
        self.tokens.put(token)
        self.position += 1
        if self.position >= self.last:
            self.end(None)
            return None
        ids, positions = torch.tensor([[token], [self.position - 1]]).to(logits.device, non_blocking=True)  # one upload
        run = ForwardRequest(ids, positions, self.cache, ordered=True)
        following = QueuedRequest(run, sequence=self, limit=self.limit)
        if self.granted is None or self.position <= self.granted:
            return following
        self.tokens.put(following)  # the reader submits it once it has been granted memory
        return None

    def end(self, error: BaseException | None) -> None:
        self.over = True
        self.tokens.put(error)
