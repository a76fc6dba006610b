"""KV of a prompt's first tokens, as computed by a plain pass over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ragcache.kv.buffers import SharedContext
from ragcache.kv.fused_cache import FusedCache
from ragcache.kv.state import State

Read = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""Returns a layer's rotated keys and values of tokens [start, stop): [num_kv_heads, stop - start, head_dim] each."""


class Exact(Protocol):
    """KV of the prompt's first `num_tokens` tokens, computed by earlier passes, with keys rotated to 0, 1, ..."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def states(self) -> Sequence[State]:
        """Return the states of recurrent layers after these tokens."""

    def copy_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's keys and values to [num_kv_heads, num_tokens, head_dim] each."""


def place_exact(cache: FusedCache, layer: int, exact: Exact) -> None:
    """Place the tokens of `exact` in a layer of a cache; recurrent layers are numbered after the others."""
    rank = layer - len(cache.lengths)
    if rank >= 0:
        cache.states[rank] = exact.states[rank] if exact.num_tokens else None
        return
    keys, values = cache.reserve(layer, torch.arange(exact.num_tokens, device=cache.shape.device))
    exact.copy_layer(layer, keys[0], values[0])


def read_cache(cache: FusedCache | SharedContext) -> Read:
    """Return a `read` function for `PrefixCache.insert`, over a cache whose layers hold positions 0 to n - 1.

    The cache may hold these positions in any order. The cache's base and the tokens after it are read separately,
    because joining them would copy both for every page.
    """
    order: dict[int, Tensor] = {}

    def read(layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        parts = [cache.layer_state(layer)] if isinstance(cache, SharedContext) else cache.parts(layer)
        if layer not in order:
            order[layer] = torch.cat([positions for _, _, positions in parts]).argsort()
        index = order[layer][start:stop]
        return _gathered([keys[0] for keys, _, _ in parts], index), _gathered([v[0] for _, v, _ in parts], index)

    return read


def states_behind(cache: FusedCache | SharedContext, num_tokens: int) -> list[State]:
    """Return the states of recurrent layers after `num_tokens` tokens; none if the cache holds more or fewer tokens."""
    held = cache.num_tokens if isinstance(cache, SharedContext) else cache.get_seq_length()
    return [state for state in cache.states if state is not None] if held == num_tokens else []


def _gathered(parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """Return the tokens at `index`, as if the parts, [num_kv_heads, num_tokens, head_dim] each, were concatenated.

    The result is [num_kv_heads, len(index), head_dim]. Only the tokens at `index` are copied.
    """
    out = parts[-1].new_empty(parts[-1].shape[0], index.shape[0], parts[-1].shape[2])
    start = 0
    for part in parts:
        here = (index >= start) & (index < start + part.shape[1])
        out[:, here] = part.index_select(1, index[here] - start)
        start += part.shape[1]
    return out
