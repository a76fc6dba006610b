"""Blocks of what stands before the passages: system prompts, and conversations so far."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ragcache.kv.block import KVBlock
from ragcache.models.lm import LanguageModel


class PrefixBlock(NamedTuple):
    """block: None for no tokens. created_tokens, encode_s: tokens that were run for it now, and seconds"""

    block: KVBlock | None = None
    created_tokens: int = 0
    encode_s: float = 0.0


class PrefixBlocks:
    """Prefixes that were read. Thread-safe.

    A prefix that begins as one that is known does is read from where they part: of a conversation, only what was said
    since its last turn runs. What is known is exact for every method that reads blocks, since they all read the prefix
    as running text.

    budget_bytes: the least recently used go; the last one used stays in any case
    """

    def __init__(self, lm: LanguageModel, budget_bytes: int) -> None:
        self._lm = lm
        self._budget_bytes = budget_bytes
        self._known: OrderedDict[tuple[int, ...], KVBlock] = OrderedDict()
        self._clears = 0
        self._lock = threading.Lock()

    def get(self, ids: Sequence[int]) -> PrefixBlock:
        """The isolated block of these tokens. Raises PromptError for an id outside the vocabulary."""
        wanted = tuple(ids)
        if not wanted:
            return PrefixBlock()
        with self._lock:
            clears = self._clears
            shared, begun = self._longest(wanted)
            if begun is not None and shared == begun.num_tokens == len(wanted):
                self._known.move_to_end(wanted)
                return PrefixBlock(begun)
        started = time.perf_counter()
        block = self._read_on(wanted, shared, begun)  # outside the lock: no other asker waits for a long conversation
        with self._lock:
            if clears == self._clears:  # else it may quote what was deleted meanwhile
                self._keep(wanted, block)
        return PrefixBlock(block, len(wanted) - shared, time.perf_counter() - started)

    def clear(self) -> None:
        with self._lock:
            self._clears += 1
            self._known.clear()

    def _longest(self, wanted: tuple[int, ...]) -> tuple[int, KVBlock | None]:
        """The most tokens that a known prefix shares with this one, and its block."""
        if wanted in self._known:
            return len(wanted), self._known[wanted]
        lengths = {ids: _shared(ids, wanted) for ids in self._known}
        best = max(lengths, key=lengths.__getitem__, default=None)
        return (0, None) if best is None or not lengths[best] else (lengths[best], self._known[best])

    def _read_on(self, ids: tuple[int, ...], shared: int, begun: KVBlock | None) -> KVBlock:
        if begun is None:
            return self._lm.encode([ids])[0]
        head = begun.map(lambda tensor: tensor[:, :, :shared])
        if shared == len(ids):
            return head.map(torch.clone)  # a view would keep what it is cut from
        rest = self._lm.encode([ids[shared:]], "prefix", ids[:shared], prefix_block=head)[0]
        return KVBlock(
            torch.cat([head.keys, rest.keys], dim=2), torch.cat([head.values, rest.values], dim=2), head.recipe
        )

    def _keep(self, ids: tuple[int, ...], block: KVBlock) -> None:
        """In the place of what it goes on from: that can be cut from it."""
        for known in [known for known in self._known if _shared(known, ids) == len(known)]:
            del self._known[known]
        self._known[ids] = block
        held = sum(one.num_bytes for one in self._known.values())
        while held > self._budget_bytes and len(self._known) > 1:
            held -= self._known.popitem(last=False)[1].num_bytes


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
