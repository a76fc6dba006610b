"""Blocks of what stands before the passages: system prompts, and conversations so far."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ragcache.kv.block import KVBlock
from ragcache.kv.prefix_tree import PrefixTree
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

    They are held within the prefix tree's budget, half of it at most unless there is but one; the least recently used
    go. One that does not fit is read at every question.
    """

    def __init__(self, lm: LanguageModel, tree: PrefixTree) -> None:
        self._lm = lm
        self._tree = tree
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

    def block(self, ids: Sequence[int]) -> KVBlock | None:
        return self.get(ids).block

    def clear(self) -> None:
        with self._lock:
            self._clears += 1
            for known in list(self._known):
                self._drop(known)

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
        """Replaces prefixes that it goes on from: they can be cut from it."""
        for known in [known for known in self._known if _shared(known, ids) == len(known)]:
            self._drop(known)
        room = max(self._tree.budget_bytes // 2, block.num_bytes)
        while self._known and block.num_bytes + sum(one.num_bytes for one in self._known.values()) > room:
            self._drop(next(iter(self._known)))
        if self._tree.lend(block.num_bytes):
            self._known[ids] = block

    def _drop(self, ids: tuple[int, ...]) -> None:
        self._tree.take_back(self._known.pop(ids).num_bytes)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
