"""The transformers Cache that fused prefill and decoding run on.

Room is reserved once: placed blocks and new tokens are written in place and nothing is ever concatenated. Layers may
hold different tokens: every layer has its own length and its own key positions. `fill` is called when a layer is first
used, so a layer's blocks are placed (and waited for) just before the layer needs them. If the pool has a lane, `fill`
is called for all layers at once, and each layer waits only for its own placing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ragcache.errors import ConfigError
from ragcache.kv.buffers import BufferHandle, BufferPool, KVBuffers, SharedContext
from ragcache.kv.cache_shape import CacheShape
from ragcache.kv.lane import Lane, Wait
from ragcache.kv.state import State

Adjust = Callable[[Tensor, Tensor], Tensor]
Merge = Callable[[Tensor, Tensor], Tensor]
Place = Callable[["FusedCache", int], None]
"""Places a layer's context in a cache; recurrent layers are numbered after the others."""


class CacheMark(NamedTuple):
    """The contents of a cache at a moment, by layer.

    lengths: number of tokens
    ran:     number of these tokens that had run
    filled:  whether the context was placed
    states:  states of the recurrent layers
    """

    lengths: tuple[int, ...]
    ran: tuple[int, ...]
    filled: tuple[bool, ...]
    states: tuple[State | None, ...]


class FusedCache(Cache):  # type: ignore[misc]
    """The placed context, followed by every token that runs.

    capacity: tokens to reserve, without those of `base`; it grows by half when more arrive
    fill:     called for each layer before it is first used
    place_s:  the seconds that `fill` has taken so far
    base:     instead of `fill`, the context that another cache has shared. It is copied only if its tokens are replaced
              or dropped
    adjust:   changes attention scores after scaling and masking, in the prefill and in decoding: a function of (float32
              [batch, num_kv_heads, groups, num_tokens, length], key positions int64 [length] or [num_kv_heads, length])
              that returns the scores' shape
    merge:    computes the entry that replaces another: a function of (old, new), both [1, num_kv_heads, num_tokens,
              head_dim], for keys and for values; without it the new entry is written
    probing:  whether `update` only returns new keys and values, without storing them
    states:   of recurrent layers, after all tokens so far; None: before the first token
    """

    def __init__(
        self, pool: BufferPool, capacity: int, fill: Place | None = None, base: SharedContext | None = None
    ) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._loan: BufferHandle | None = BufferHandle(pool, pool.acquire(max(capacity, 1)))
        self._buffers = self._loan.buffers
        self._shared: SharedContext | None = None
        self.base = base
        self.fill = fill
        self.place_s = 0.0
        self.lengths = [self._base_tokens] * pool.shape.num_layers
        self.states: list[State | None] = [*base.states] if base and base.states else [None] * len(pool.shape.states)
        self._placed_states = list(self.states)
        self._filled = [fill is None] * (pool.shape.num_layers + len(self.states))
        self._placed = [0] * pool.shape.num_layers
        self._ran = [0] * pool.shape.num_layers
        self.adjust: Adjust | None = None
        self.merge: Merge | None = None
        self.probing = False
        self._projected = [0] * pool.shape.num_layers
        self._head_positions: dict[int, Tensor] = {}
        self._new_positions: Tensor | None = None
        self._slots: Tensor | Sequence[Tensor] | None = None
        self._rows: Tensor | None = None
        self._is_held = self._is_released = False
        self._arriving: dict[int, Wait] = {}
        if pool.lane is not None:
            pool.lane.drop_done()

    def release(self) -> None:
        """Return the buffers to the pool, once no pass uses them. The cache must not be used afterwards."""
        self._is_released = True
        if not self._is_held:
            self._loan = self._shared = self.base = None
        if self._pool.lane is not None:
            self._pool.lane.drop_done()

    def acquire_reference(self) -> None:
        """Keep the buffers until `release_reference`, even if `release` is called: a pass is about to use them."""
        self._is_held = True

    def release_reference(self) -> None:
        """Undo `acquire_reference`, and return the buffers if `release` has been called."""
        self._is_held = False
        if self._is_released:
            self._loan = self._shared = self.base = None

    @property
    def _base_tokens(self) -> int:
        return 0 if self.base is None else self.base.num_tokens

    def share(self, num_tokens: int) -> SharedContext:
        """Share the first tokens, so that other caches can extend them. This cache keeps them unchanged and goes on.

        Raises ConfigError if heads or layers hold different tokens, or a recurrent layer's state would have to be cut.
        """
        if self._loan is None or self.fill is not None or min(self.lengths) < num_tokens or self._head_positions:
            raise ConfigError(
                "only what all heads of all layers hold alike can be shared; read the passages from blocks that hold "
                "all of their KV, by a method that drops no token of them"
            )
        states = self.states if max(self.lengths) == num_tokens else self._placed_states
        placed = max(self.lengths) - max(self._ran)  # tokens that were here before any ran
        if states is self._placed_states and states and placed != num_tokens:
            raise ConfigError(
                "a recurrent layer's state cannot be cut: only all tokens, or all that were placed, can be shared; "
                "read the passages by reposition, which places them"
            )
        self._own_base()
        self._shared = SharedContext(self._loan, num_tokens, [state for state in states if state is not None])
        return self._shared

    @property
    def shape(self) -> CacheShape:
        return self._pool.shape

    @property
    def capacity(self) -> int:
        return self._buffers.capacity

    @property
    def is_even(self) -> bool:
        """Return whether the pass replaces the same tokens in all layers, so that all layers hold the same tokens."""
        return isinstance(self._slots, Tensor) and not self._head_positions

    @property
    def own_tokens(self) -> int:
        """Return the number of tokens after its `base`, in the layer with the most."""
        return max(self.lengths) - self._base_tokens

    @property
    def computed_tokens(self) -> tuple[int, ...]:
        """Return how many tokens the model ran into this cache, by layer.

        Tokens that were only projected, for their keys, count too.
        """
        return tuple(max(ran, projected) for ran, projected in zip(self._ran, self._projected, strict=True))

    def reserve(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Append room for tokens at these key positions to a layer.

        positions: int64 [num_tokens], or [num_kv_heads, num_tokens] if heads hold different tokens

        Returns views of keys and values, [1, num_kv_heads, num_tokens, head_dim], to be written by the caller.
        """
        count = positions.shape[-1]
        start = self.lengths[layer] - self._base_tokens
        end = start + count
        if end > self.capacity:
            self._move_to(self._pool.acquire(max(end, self.capacity + self.capacity // 2)))
        buffers = self._buffers
        if positions.dim() == 1:
            buffers.positions[layer][start:end] = positions
        else:
            before = self.layer_state(layer)[2].expand(positions.shape[0], -1)
            self._head_positions[layer] = torch.cat([before, positions], dim=1)
        self.lengths[layer] += count
        return buffers.keys[layer][:, :, start:end], buffers.values[layer][:, :, start:end]

    def places(self, num_tokens: int) -> tuple[int, int, int, int] | None:
        """Make room for `num_tokens` more tokens, and return where the cache's tokens are in the pool's arena.

        Returns the slot of the base's first token, the base's number of tokens, the slot of the first token after the
        base, and the number of all tokens including the new ones. The context is placed before, or queued to be placed.

        Returns None if the tokens are not in the arena, differ from layer to layer or head to head, or if scores are
        changed.
        """
        for layer in range(len(self._filled) if self._pool.lane is None else 1):
            self.ensure(layer)
        self.make_room(num_tokens)
        base, own = self._buffers.start if self.base is None else self.base.start, self._buffers.start
        is_even = len(set(self.lengths)) == 1 and not self._head_positions
        if base is None or own is None or not is_even or self.adjust is not None:
            return None
        return base, self._base_tokens, own, self.lengths[0] + num_tokens

    def appended(self, num_tokens: int) -> None:
        """Record that a graph has appended `num_tokens` tokens in every layer."""
        self.lengths = [length + num_tokens for length in self.lengths]
        self._ran = [ran + num_tokens for ran in self._ran]

    def begin(self, positions: Tensor, slots: Tensor | Sequence[Tensor] | None = None) -> None:
        """Announce the tokens of the coming pass: their positions, int64 [num_tokens].

        slots: int64 [num_tokens], where keys and values are written if they replace placed tokens (recompute methods);
               a tensor for each layer if layers hold different tokens; None: they are appended
        """
        self._new_positions = positions
        self._slots = slots
        self._rows = None

    def mark(self) -> CacheMark:
        """Return the present contents, for `rewind`."""
        return CacheMark(tuple(self.lengths), tuple(self._ran), tuple(self._filled), tuple(self.states))

    def rewind(self, mark: CacheMark) -> None:
        """Drop everything appended since `mark`; a context placed in the meantime stays."""
        for layer, length in enumerate(mark.lengths):
            placed_since = self._filled[layer] and not mark.filled[layer]
            self.lengths[layer] = self._placed[layer] if placed_since else length
        for rank, state in enumerate(mark.states):
            placed_since = self._filled[rank - len(mark.states)] and not mark.filled[rank - len(mark.states)]
            self.states[rank] = self._placed_states[rank] if placed_since else state
        self._ran = list(mark.ran)

    @torch.inference_mode()
    def place(self) -> None:
        """Place every layer's context now. Without this call, each is placed just before its layer runs."""
        for layer in range(len(self._filled)):
            self.ensure(layer)

    def state(self, rank: int) -> State | None:
        """Return the state of a recurrent layer, after placing its context."""
        self.ensure(len(self.lengths) + rank)
        return self.states[rank]

    def narrow(self, rows: Tensor | None) -> None:
        """Restrict the pass to some of the announced tokens, from the next layer on.

        rows: int64 [num_rows], their indices among the announced tokens; None: all
        """
        self._rows = rows

    @torch.inference_mode()  # buffers may have been made in a pass
    def retain(self, layer: int, index: Tensor) -> None:
        """Drop all of a layer's entries except these: int64 [num_kept]. All heads hold the same tokens.

        The kept entries are moved together in the given order; decoding continues after them.
        """
        self._own()
        keys, values, positions = self.layer_state(layer)
        self.lengths[layer] = count = len(index)
        for held in (keys, values):
            held[:, :, :count] = held[:, :, index]
        self._buffers.positions[layer][:count] = positions[index]

    def layer_state(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's keys and values, [1, num_kv_heads, length, head_dim], and key positions.

        Positions are int64 [length], or [num_kv_heads, length] if heads hold different tokens. With a `base` the
        tensors are copies.
        """
        parts = self.parts(layer)
        keys, values, positions = parts[-1]
        if len(parts) > 1:
            below = parts[0]
            keys, values = torch.cat([below[0], keys], dim=2), torch.cat([below[1], values], dim=2)
            positions = torch.cat([below[2], positions])
        if layer in self._head_positions:
            retained = self._head_positions[layer]
            positions = torch.cat([retained, positions[retained.shape[1] :].expand(retained.shape[0], -1)], dim=1)
        return keys, values, positions

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return a layer's keys, values and key positions: those of its `base`, if any, then those after it."""
        below = [] if self.base is None else [self.base.layer_state(layer)]
        keys, values = self.own_state(layer)
        return [*below, (keys, values, self._buffers.positions[layer][: keys.shape[2]])]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens' rotated keys and values; the model's attention calls this.

        Returns the keys and values of all of the layer's tokens after `base`, the new ones included. While `probing`,
        nothing is written and the arguments are returned.
        """
        num_tokens, layer_idx = key_states.shape[2], self._pool.shape.rank(layer_idx)
        if self.probing:
            self._projected[layer_idx] = max(num_tokens, self._projected[layer_idx])
            return key_states, value_states
        in_order = self._pool.shape.in_order
        key_states, value_states = in_order(layer_idx, (key_states, value_states))
        self._ran[layer_idx] += num_tokens
        self.ensure(layer_idx)
        slots = self._slots if self._slots is None or isinstance(self._slots, Tensor) else self._slots[layer_idx]
        if slots is None:
            if (positions := self._new_positions) is None:
                positions = torch.arange(self.lengths[0], self.lengths[0] + num_tokens, device=self.shape.device)
            elif self._rows is not None:
                positions = positions[self._rows]
            keys, values = self.reserve(layer_idx, positions)
            keys.copy_(key_states)
            values.copy_(value_states)
        else:
            self._own()
            slots = slots if self._rows is None else slots[self._rows]
            self._replace(self._buffers.keys[layer_idx], slots, key_states)
            self._replace(self._buffers.values[layer_idx], slots, value_states)
        return in_order(layer_idx, self.own_state(layer_idx))

    def _replace(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        new = new.to(held.dtype)
        if self.merge is not None:
            new = self.merge(held.index_select(2, slots), new)
        held.index_copy_(2, slots, new)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.lengths[layer_idx]

    def own_state(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, [1, num_kv_heads, length, head_dim], of the tokens after its `base`."""
        self.ensure(layer)
        end = self.lengths[layer] - self._base_tokens
        return self._buffers.keys[layer][:, :, :end], self._buffers.values[layer][:, :, :end]

    def ensure(self, layer: int) -> None:
        """Place a layer's context if it is not placed yet, or make the current stream wait for the lane to place it."""
        if self.fill is not None and not self._filled[layer]:
            started = time.perf_counter()
            if self._pool.lane is None or layer >= len(self.lengths):  # states are computed by the current stream
                self._filled[layer] = True
                self.fill(self, layer)
                self._note_placed(layer)
            else:
                self._fill_beside(self._pool.lane, self.fill)
            self.place_s += time.perf_counter() - started
        if self._arriving and (wait := self._arriving.pop(layer, None)) is not None:
            wait()
            if self._pool.lane is not None and layer in self._head_positions:
                self._pool.lane.share(self._head_positions[layer])

    def _fill_beside(self, lane: Lane, fill: Place) -> None:
        lane.follow()
        held, buffers = (fill, self._loan), self._buffers
        for layer in [layer for layer in range(len(self.lengths)) if not self._filled[layer]]:
            self._filled[layer] = True
            self._arriving[layer] = last = lane.run(partial(fill, self, layer), held)
            self._note_placed(layer)
        if buffers is not self._buffers:  # the buffers had to grow: all layers arrive with the last layer
            self._arriving = dict.fromkeys(self._arriving, last)

    def _note_placed(self, layer: int) -> None:
        if layer < len(self.lengths):
            self._placed[layer] = self.lengths[layer]
        else:
            self._placed_states[layer - len(self.lengths)] = self.states[layer - len(self.lengths)]
        if all(self._filled):
            self.fill = None  # `fill` holds the blocks, which decoding does not need

    @torch.inference_mode()  # buffers may have been made in a pass
    def make_room(self, num_tokens: int) -> int:
        """Make room for `num_tokens` more tokens, in larger buffers if necessary. Return how many tokens fit now."""
        used = self.own_tokens
        if used + num_tokens > self.capacity:
            self._move_to(self._pool.acquire(used + num_tokens))
        return self.capacity - used

    def _move_to(self, new: KVBuffers) -> None:
        for wait in self._arriving.values():
            wait()
        new.copy_from(self._buffers, self.own_tokens)
        self._use(new)

    def _use(self, buffers: KVBuffers) -> None:
        self._loan, self._buffers, self._shared = BufferHandle(self._pool, buffers), buffers, None

    def _own(self) -> None:
        """Copy shared tokens before they are replaced or dropped, so that other caches see no change."""
        self._own_base()
        if self._shared is not None:
            self._move_to(self._pool.acquire(self.capacity))

    def _own_base(self) -> None:
        """Copy the base's tokens and the cache's own tokens after them into new buffers, and drop the base."""
        if self.base is None:
            return
        new = self._pool.acquire(self.base.num_tokens + self.capacity)
        for layer, length in enumerate(self.lengths):
            keys, values, positions = self.layer_state(layer)
            new.keys[layer][:, :, :length], new.values[layer][:, :, :length] = keys, values
            new.positions[layer][:length] = positions
        self.base = None
        self._use(new)
