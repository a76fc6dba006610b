"""KV of passages as prompts left it under different contexts, within a budget of bytes."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakKeyDictionary

from ragcache.fusion.method import Scope
from ragcache.kv.block import KVBlock, empty_block

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.kv.fused_cache import FusedCache
    from ragcache.models.language_model import LanguageModel


@dataclass(frozen=True, eq=False)
class Anchor:
    """A passage's KV under a context.

    passage: digest of the model and the passage's ids; context: digest of the ids before the passage
    about:   the feature by which a method compares contexts, float32, on the CPU
    block:   the passage's KV in a prompt after that context, keys before RoPE
    """

    passage: bytes
    context: bytes
    about: Tensor
    block: KVBlock

    @property
    def num_bytes(self) -> int:
        return self.block.num_bytes + self.about.nbytes


A = TypeVar("A", bound=Anchor)


class AnchorPool(Generic[A]):
    """Anchors of several scopes; the least recently used are evicted first. Thread-safe.

    max_bytes:   of all anchors; never exceeded
    max_anchors: of a single passage

    scope: for prompts that name no scope; it lasts as long as the pool
    """

    def __init__(self, max_bytes: int, max_anchors: int) -> None:
        self.max_bytes = max_bytes
        self.max_anchors = max_anchors
        self.scope = Scope()
        # By scope, the least recently used first, each with the time of that use.
        self._held: WeakKeyDictionary[Scope, OrderedDict[tuple[bytes, bytes], tuple[A, int]]]
        self._held = WeakKeyDictionary()
        self._clock = count()
        self._lock = threading.RLock()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(anchor.num_bytes for held in self._held.values() for anchor, _ in held.values())

    def of(self, scope: Scope, passage: bytes) -> list[A]:
        """Return the passage's anchors, the least recently used first."""
        with self._lock:
            return [anchor for anchor, _ in self._held.get(scope, {}).values() if anchor.passage == passage]

    def put(self, scope: Scope, anchor: A) -> None:
        """Keep an anchor, or note its use; others are evicted for it. An anchor larger than the budget is not kept."""
        if anchor.num_bytes > self.max_bytes:
            return
        with self._lock:
            held = self._held.setdefault(scope, OrderedDict())
            key = anchor.passage, anchor.context
            held[key] = anchor, next(self._clock)
            held.move_to_end(key)
            of_passage = [known for known in held if known[0] == anchor.passage]
            for known in of_passage[: -self.max_anchors]:
                del held[known]
            excess = self.num_bytes - self.max_bytes
            while excess > 0:
                excess -= self._drop_oldest()

    def _drop_oldest(self) -> int:
        """Drop the least recently used anchor of all scopes. Returns its bytes."""
        oldest = min(filter(None, self._held.values()), key=lambda held: next(iter(held.values()))[1])
        return oldest.popitem(last=False)[1][0].num_bytes


def ids_digest(ids: Sequence[int]) -> bytes:
    return sha256(array("q", ids).tobytes()).digest()


def cut(lm: LanguageModel, cache: FusedCache, slot: int, position: int, num_tokens: int) -> KVBlock:
    """Return a passage's KV from a cache, keys before RoPE, on the CPU. slot, position: of its first token"""
    block = empty_block(lm.shape, num_tokens)
    for layer in range(lm.shape.num_layers):
        keys, values, _ = cache.layer_state(layer)
        held = slice(slot, slot + num_tokens)
        lm.rope.unrotate(keys[0, :, held], layer, position, out=block.layer_keys(layer))
        block.layer_values(layer).copy_(values[0, :, held])
    return block.map(lambda tensor: tensor.cpu())
