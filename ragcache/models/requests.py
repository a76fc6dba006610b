"""Requests that wait for the model and run in its passes: the tokens of callers, and the sequences that are decoded."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ragcache.kv.fused_cache import FusedCache
from ragcache.models.batch import ForwardRequest, ScheduledTokens
from ragcache.models.deadline import NO_LIMIT, Limit


@dataclass(eq=False)
class QueuedRequest:
    """Tokens that wait for a pass.

    alone:    runs them in a pass of its own; None for a run that may share one
    sequence: what they are the next token of; None where a caller waits for the logits
    finished: has its logits, or what it failed with, once it has run
    """

    run: ForwardRequest
    alone: Callable[[], Tensor] | None = None
    sequence: DecodingSequence | None = None
    limit: Limit = NO_LIMIT
    finished: Future[Tensor] = field(default_factory=Future)


class ScheduledRequest(NamedTuple):
    """A request in a pass, and the tokens of it that run there."""

    request: QueuedRequest
    piece: ScheduledTokens


@dataclass(eq=False)
class DecodingSequence:
    """A sequence that is being decoded.

    choose:   picks a token from logits, float32 [vocab_size]
    position: of the next token; `last`: the first one that is not decoded any more
    granted:  the first one that there is no room for yet; None: for all of them
    more:     gives further room, in the reader's thread: returns for how many tokens
    tokens:   what the reader gets: ids, then None, or an exception in its place; where there is no room for the next
              one, the request that brings it
    over:     nobody reads it any more, or it has ended
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
        """Choose the next token and hand it out; the request that brings the one after it, None at the end."""
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
        run, step = ForwardRequest(ids, positions, self.cache, ordered=True), self.cache.step
        alone = None if step is None else partial(step, self.cache, ids, positions)
        following = QueuedRequest(run, alone, sequence=self, limit=self.limit)
        if self.granted is None or self.position <= self.granted:
            return following
        self.tokens.put(following)  # the reader submits it, when it has found room
        return None

    def end(self, error: BaseException | None) -> None:
        self.over = True
        self.tokens.put(error)
