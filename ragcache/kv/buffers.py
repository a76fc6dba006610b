"""The memory of caches: buffers with room for keys and values, and the pool that lends them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.kv.block import empty_block
from ragcache.kv.cache_shape import CacheShape
from ragcache.kv.lane import Lane
from ragcache.kv.state import State

# Buffers have few sizes, so that idle buffers fit later requests. A question over a shared context needs only a few
# dozen tokens: in steps of 256, eight requests over 2,000 shared tokens held 1.8 times the memory of one request.
LARGEST_STEP, _SMALL_STEP = 256, 64
_SMALL = 512


@dataclass(frozen=True, eq=False)
class KVBuffers:
    """Buffers by layer: keys and values [1, num_kv_heads, capacity, dim]; positions of the keys, int64 [capacity].

    start: slot of their first token in the pool's arena; None: they are not part of the arena
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    start: int | None = None

    @classmethod
    def allocate(cls, shape: CacheShape, capacity: int) -> KVBuffers:
        room, layers = empty_block(shape, capacity), range(shape.num_layers)
        keys, values = [room.layer_keys(i)[None] for i in layers], [room.layer_values(i)[None] for i in layers]
        positions = torch.empty(shape.num_layers, capacity, dtype=torch.int64, device=shape.device)
        return cls(tuple(keys), tuple(values), positions.unbind(0))

    @property
    def capacity(self) -> int:
        return self.positions[0].shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for part in (self.keys, self.values, self.positions) for tensor in part)

    def part(self, start: int, end: int) -> KVBuffers:
        keys, values = ([tensor[:, :, start:end] for tensor in part] for part in (self.keys, self.values))
        return KVBuffers(tuple(keys), tuple(values), tuple(tensor[start:end] for tensor in self.positions), start)

    def copy_from(self, other: KVBuffers, count: int) -> None:
        """Copy the first `count` tokens that `other` holds in every layer."""
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[:, :, :count] = theirs[:, :, :count]
        for mine, theirs in zip(self.positions, other.positions, strict=True):
            mine[:count] = theirs[:count]


def capacity_for(num_tokens: int) -> int:
    """Return the capacity, in tokens, of the buffers that are allocated for a request of `num_tokens` tokens."""
    step = _SMALL_STEP if num_tokens <= _SMALL else LARGEST_STEP
    return -(-num_tokens // step) * step


class BufferPool:
    """Keeps the buffers of finished requests: fresh pages cost more than the copy into them. Thread-safe.

    max_bytes: idle buffers beyond this are freed, the oldest first
    lane:      the CUDA stream that places contexts in the buffers while other passes run; None: a pass places its own
               context
    arena:     an allocation from which buffers are cut while it has room, so that a CUDA graph can read any of them;
               None: each buffer is allocated separately
    """

    NOWHERE, SINK = 0, 1
    """Slots of the arena: NOWHERE holds zeros and is never written; SINK takes writes and is never read."""

    def __init__(self, shape: CacheShape, max_bytes: int) -> None:
        self.shape = shape
        self.max_bytes = max_bytes
        self.lane: Lane | None = None
        self.arena: KVBuffers | None = None
        self._taken = bytearray()  # for each _SMALL_STEP tokens of the arena
        self._idle: list[KVBuffers] = []
        # Re-entrant: the garbage collector may finalise a cache, and so call release(), inside acquire() or release().
        self._lock = threading.RLock()

    def open_arena(self, num_tokens: int) -> KVBuffers:
        """Allocate an arena of `num_tokens` zeroed tokens, cut buffers from it from now on, and return it."""
        arena = KVBuffers.allocate(self.shape, num_tokens)
        for tensor in (*arena.keys, *arena.values, *arena.positions):
            tensor.zero_()
        with self._lock:
            self.arena, self._taken = arena, bytearray([True, *bytes(num_tokens // _SMALL_STEP - 1)])
        return arena

    def acquire(self, capacity: int) -> KVBuffers:
        """Return a part of the arena for `capacity` tokens, else the smallest idle buffers that fit, or new ones."""
        steps = -(-capacity // _SMALL_STEP)
        with self._lock:
            if self.arena is not None and (at := self._taken.find(bytes(steps))) >= 0:
                self._taken[at : at + steps] = b"\1" * steps
                return self.arena.part(at * _SMALL_STEP, (at + steps) * _SMALL_STEP)
            fitting = [b for b in self._idle if b.capacity >= capacity]
            if fitting:
                best = min(fitting, key=lambda b: b.capacity)
                self._idle = [b for b in self._idle if b is not best]
                return best
        return KVBuffers.allocate(self.shape, capacity_for(capacity))

    def release(self, buffers: KVBuffers) -> None:
        with self._lock:
            if buffers.start is not None:
                at, steps = buffers.start // _SMALL_STEP, buffers.capacity // _SMALL_STEP
                self._taken[at : at + steps] = bytes(steps)
                return
            self._idle.append(buffers)
            while self._idle and sum(b.num_bytes for b in self._idle) > self.max_bytes:
                self._idle.pop(0)


class BufferHandle:
    """Buffers from a pool, which return to it when the last reference to the handle is dropped."""

    def __init__(self, pool: BufferPool, buffers: KVBuffers) -> None:
        self.buffers = buffers
        weakref.finalize(self, pool.release, buffers)


class SharedContext:
    """The first tokens of a cache, which other caches extend. They are never written to again.

    They live as long as a cache uses them.

    num_tokens: in every layer
    states:     of recurrent layers, after these tokens
    """

    def __init__(self, loan: BufferHandle, num_tokens: int, states: Sequence[State] = ()) -> None:
        self._loan = loan
        self.num_tokens = num_tokens
        self.states = tuple(states)

    @property
    def start(self) -> int | None:
        """Return the first token's slot in the pool's arena; None: the buffers are not part of the arena."""
        return self._loan.buffers.start

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the cache's buffers, unused room included."""
        return self._loan.buffers.num_bytes + sum(state.num_bytes for state in self.states)

    def layer_state(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values, [1, num_kv_heads, num_tokens, head_dim], and key positions, int64 [num_tokens]."""
        buffers, end = self._loan.buffers, self.num_tokens
        return buffers.keys[layer][:, :, :end], buffers.values[layer][:, :, :end], buffers.positions[layer][:end]

    def copy_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's keys and values to [num_kv_heads, num_tokens, head_dim] each."""
        own_keys, own_values, _ = self.layer_state(layer)
        keys.copy_(own_keys[0])
        values.copy_(own_values[0])
