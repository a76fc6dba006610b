"""The attention function that transformers calls instead of its own.

Registered under "ragcache" through transformers' public AttentionInterface. It keeps KV heads unrepeated, reads keys
where they are placed, and derives visibility from token positions instead of a prepared mask.

Two kinds of pass run through it:

- an *encode* pass reads chunks alone. The rotary module returns the identity, so the keys that arrive are final but
  not rotated; they are recorded, and rotated here with the family's own function.
- a *fused* pass runs tokens over a FusedCache. The model rotates them itself; placed keys are already rotated.

Several fused passes may run as a single *joint* pass (`models/batch.py`), whose rows are split by request here.

The current pass travels in a ContextVar, because one model serves several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from ragcache.kv.buffers import KVBuffers, SharedContext
from ragcache.kv.fused_cache import FusedCache
from ragcache.kv.rope import Rope, Source, as_angles
from ragcache.kv.state import State, StateMap
from ragcache.models.attention_kernels import (
    PartialAttention,
    Scoring,
    additive,
    attend,
    attend_last,
    attend_own,
    attend_part,
    attention_weights,
    has_kernel,
    visible,
)
from ragcache.models.latent import ABSORBED, LATENT, Expanded, absorbed_of, expand, form_of
from ragcache.runtime import during

Pair = tuple[Tensor, Tensor]
NAME = "ragcache"
RANK = "ragcache_rank"
"""Attribute of attention modules in recurrent models: their index among the layers that keep keys and values."""
# Rows that share a mask. The more rows share it, the more keys they attend to that only the last of them can see. A
# GPU repeats the KV heads for every span, so it gets few spans.
CPU_SPAN_ROWS = 128
GPU_SPAN_ROWS = 1024
SCORES_AT_ONCE = 1 << 24  # attention weights that are computed together: 64 MiB


@dataclass(eq=False)
class EncodePass:
    """Chunks read alone, or after a shared prefix.

    rope:   None in a plain pass, where the model rotates its keys itself
    prefix: rotated keys and values of the prefix by layer, [1, num_kv_heads, prefix_tokens, head_dim]; empty for none
    angles: cos and sin by their source, as the model computed them; filled by the rotary hook
    windows: the sliding window of each layer; None if the layer sees everything
    received: keys and values that each layer last attended to; only in a plain pass
    lengths: tokens of each chunk whose map of states is to be computed; see `models/recurrence.py`
    states:  states that enter recurrent layers, from the end of the prefix; empty for none
    maps:    by chunk, the maps of the recurrent layers so far
    """

    rope: Rope | None
    prefix: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    angles: dict[Source, tuple[Tensor, Tensor]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    received: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    lengths: Sequence[int] = ()
    states: Sequence[State] = ()
    maps: list[list[StateMap]] = field(default_factory=list)


class Projected(NamedTuple):
    """Inputs of a layer's attention, query and key rotated.

    query:      [1, num_heads, num_rows, head_dim]
    key, value: [1, num_kv_heads, num_rows, head_dim] of the same tokens
    positions:  int64 [num_rows]
    scoring:    how the layer scores them
    window:     the layer's sliding window, or None
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    scoring: Scoring
    window: int | None

    def weights(self, key: Tensor, key_positions: Tensor) -> Iterator[Tensor]:
        """Yield attention weights summed over heads, float32 [rows, length], a few rows at a time to save memory.

        key: [1, num_kv_heads, length, head_dim], rotated: all keys of the softmax; each row sees those at or before its
             position and within the window
        """
        query, positions = self.query, self.positions
        step = max(1, SCORES_AT_ONCE // (query.shape[1] * key.shape[2]))
        for start in range(0, query.shape[2], step):
            rows = slice(start, start + step)
            mask = additive(visible(positions[rows], key_positions, self.window), torch.float32)
            yield attention_weights(query[:, :, rows], key, mask, False, self.scoring).sum((0, 1, 2))


class ProjectedSignal(Exception):  # noqa: N818 - it ends a layer early; it is no error
    """A signal that ends a probed layer early and carries its projections."""

    def __init__(self, projected: Projected) -> None:
        super().__init__()
        self.projected = projected


class RowSpan(NamedTuple):
    """Rows that attend together to the first `num_keys` keys under `mask`; None: they see all these keys."""

    start: int
    end: int
    num_keys: int
    mask: Tensor | None


@dataclass(eq=False)
class FusedPass:
    """Tokens run over a cache.

    positions: int64 [num_tokens] of all tokens of the pass
    ordered:   they come after everything in the cache, in order, so that only the last columns need a mask
    rows:      the tokens that run, int64 [num_rows]; None: all
    masks:     the masks so far, by (window, layer length), with their key positions; most layers share a mask
    """

    cache: FusedCache
    positions: Tensor
    ordered: bool
    rows: Tensor | None = None
    masks: dict[tuple[int | None, int], tuple[Tensor, list[RowSpan]]] = field(default_factory=dict)

    @property
    def running(self) -> Tensor:
        """Return the positions of the tokens that run."""
        return self.positions if self.rows is None else self.positions[self.rows]

    @cached_property
    def last_position(self) -> int:
        """Return the highest position of all tokens; read once per pass."""
        return int(self.positions.max())


@dataclass(frozen=True, eq=False)
class BatchedPass:
    """Passes of several requests as a single pass, with their rows concatenated.

    lengths: number of rows of each pass
    """

    members: Sequence[FusedPass]
    lengths: Sequence[int]


@dataclass(eq=False)
class ArenaPass:
    """Tokens of several requests, a row per request, over caches in a shared arena, as a CUDA graph runs them.

    Between passes only the numbers in its tensors differ.

    positions: int64 [rows, num_tokens]
    slots:  int64 [rows * num_tokens]: slots of the arena that the tokens' keys and values are written to
    places: int64 [rows, length]: slots of each row's keys
    order:  bool [rows, num_tokens, length]: True for keys at or before each token
    before_layer: called before anything of a layer is read
    masks:  the masks so far, by window, by layer if it has a window, and by repeats of the rows
    """

    arena: KVBuffers
    positions: Tensor
    slots: Tensor
    places: Tensor
    order: Tensor
    before_layer: Callable[[int], None]
    masks: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)

    def attend(self, module: nn.Module, query: Tensor, new: Pair, window: int | None, how: Scoring) -> Tensor:
        """Write the tokens' keys and values into the arena and attend over each row's keys.

        new: keys and values of the tokens, as the cache stores them

        The query and the result are [1, num_heads, rows * num_tokens, head_dim].
        """
        (rows, num_tokens), layer = self.positions.shape, layer_of(module)
        self.before_layer(layer)
        self.arena.positions[layer].index_copy_(0, self.slots, self.positions.flatten())
        held = []
        for buffer, tokens in zip((self.arena.keys[layer], self.arena.values[layer]), new, strict=True):
            buffer.index_copy_(2, self.slots, tokens.to(buffer.dtype))
            held.append(buffer[0][:, self.places].transpose(0, 1))
        form = form_of(module, num_tokens)
        query = form.query(query.reshape(-1, rows, num_tokens, query.shape[3]).transpose(0, 1))
        keys, values = form.held((held[0], held[1]))
        # With plain scores, the queries of a KV head become its rows: no key is repeated for them.
        repeats = query.shape[1] // keys.shape[1] if how.plain else 1
        folded = query.reshape(rows, -1, repeats * num_tokens, query.shape[3])
        out = attend(folded, keys, values, self._mask(layer, window, repeats), False, how)
        out = form.output(out.reshape(rows, -1, num_tokens, out.shape[3]))
        return out.transpose(0, 1).flatten(1, 2)[None]

    def _mask(self, layer: int, window: int | None, repeats: int) -> Tensor:
        """Return the additive mask, [rows, 1, repeats * num_tokens, length]."""
        key, mask = (window, layer if window else 0, repeats), self.order
        if key not in self.masks:
            if window is not None:
                mask = mask & (self.positions[..., None] - self.arena.positions[layer][self.places][:, None] < window)
            self.masks[key] = additive(mask[:, None].repeat(1, 1, repeats, 1), self.arena.keys[0].dtype)
        return self.masks[key]


@dataclass(frozen=True, eq=False)
class Attended:
    """A layer's attention in a fused pass, as an observer sees it.

    query:   [1, num_heads, num_rows, head_dim], rotated
    weights: function from a number of last rows to their weights over all keys of the layer:
             float32 [num_kv_heads, groups, rows, length]
    """

    layer: int
    query: Tensor
    weights: Callable[[int], Tensor]


CURRENT: ContextVar[EncodePass | FusedPass | BatchedPass | ArenaPass | None] = ContextVar("ragcache_pass", default=None)
OBSERVER: ContextVar[Callable[[Attended], None] | None] = ContextVar("ragcache_observer", default=None)


def observing(observer: Callable[[Attended], None]) -> AbstractContextManager[None]:
    """Return a context in which `observer` is called in every layer of every fused pass."""
    return during(OBSERVER, observer)


def register() -> None:
    """Register `attn_implementation="ragcache"` with transformers. Idempotent."""
    AttentionInterface.register(NAME, attention)


def encoding() -> EncodePass | None:
    """Return the current pass if it encodes passages; None in all others, plain ones among them."""
    current = CURRENT.get()
    return current if isinstance(current, EncodePass) and current.rope is not None else None


def hook_rotary(rotary: nn.Module) -> None:
    """Hook the rotary module: encode passes get the identity, and the true angles are kept for `attention`."""
    rotary.register_forward_hook(_identity_angles, with_kwargs=True)


def _identity_angles(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if (current := encoding()) is None:
        return None
    kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
    current.angles[module, kind] = as_angles(output)
    return torch.ones_like(output) if isinstance(output, Tensor) else (torch.ones_like(output[0]), output[1] * 0)


def hook_latent(module: nn.Module, rotary: int, rank: int) -> None:
    """Make a latent layer pass its latents on unexpanded in fused passes, so that attention chooses the cheaper form.

    rotary, rank: widths of the layer's rotary key and its latent
    """
    setattr(module, ABSORBED, absorbed_of(module, rotary, rank))
    setattr(module, LATENT, MethodType(_expand_later, module))


def _expand_later(module: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    current = CURRENT.get()
    is_probe = isinstance(current, FusedPass) and current.cache.probing
    is_later = isinstance(current, FusedPass | BatchedPass | ArenaPass) and not is_probe
    return (rotary, latent) if is_later else expand(module, (rotary, latent))


def layer_of(module: nn.Module) -> int:
    """Return the index of an attention module's layer among the layers that keep keys and values."""
    layer: int = getattr(module, RANK if hasattr(module, RANK) else "layer_idx")
    return layer


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention as the current pass requires.

    query: [batch, num_heads, num_tokens, head_dim]; key, value: [batch, num_kv_heads, length, head_dim].

    Returns [batch, num_tokens, num_heads, head_dim], as transformers' own attention functions do.
    """
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    current = CURRENT.get()
    if isinstance(current, FusedPass):
        if current.cache.probing:
            raise ProjectedSignal(Projected(query, key, value, current.running, scoring, sliding_window))
        own = None if hasattr(module, LATENT) else (key, value)
        out = _attend_members([current], module, [query], sliding_window, scoring, own)
    elif isinstance(current, BatchedPass):
        rows = torch.split(query, list(current.lengths), dim=2)
        out = _attend_members(current.members, module, rows, sliding_window, scoring)
    elif isinstance(current, ArenaPass):
        out = current.attend(module, query, (key, value), sliding_window, scoring)
    elif isinstance(current, EncodePass):
        query, key, value = _encode_inputs(current, module, query, key, value, sliding_window)
        out = _attend_encoded(query, key, value, sliding_window, scoring)
    else:
        out = attend(query, key, value, attention_mask, attention_mask is None and query.shape[2] > 1, scoring)
    return out.transpose(1, 2).contiguous(), None


def _encode_inputs(
    current: EncodePass, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated query, key and value, with the prefix's keys and values prepended."""
    layer = layer_of(module)
    current.windows[layer] = window
    rope = current.rope
    if rope is None:
        current.received[layer] = (key, value)
    elif (source := rope.sources[layer]) is not None:
        cos, sin = current.angles[source]
        still = query.shape[-1] - rope.key_dims[layer]  # width before the rotary key, in heads made of latents
        turned = rope.apply(query[..., still:], key[..., still:], cos, sin)
        query, key = (
            torch.cat([a[..., :still], b], -1) if still else b for a, b in zip((query, key), turned, strict=True)
        )
    if current.prefix:
        prefix_keys, prefix_values = expand(module, current.prefix[layer])
        key = torch.cat([prefix_keys.expand(key.shape[0], -1, -1, -1), key], dim=2)
        value = torch.cat([prefix_values.expand(value.shape[0], -1, -1, -1), value], dim=2)
    return query, key, value


def _attend_encoded(query: Tensor, key: Tensor, value: Tensor, window: int | None, scoring: Scoring) -> Tensor:
    num_tokens, length = query.shape[2], key.shape[2]
    windowed = window is not None and length > window
    if length == num_tokens and not windowed:
        return attend(query, key, value, None, True, scoring)
    if not windowed and (own := attend_own(query, key, value, scoring)) is not None:
        return own.complete(scoring.sinks, query.dtype)
    positions = torch.arange(length, device=key.device)
    mask = visible(positions[-num_tokens:], positions, window if windowed else None)
    return attend(query, key, value, additive(mask, query.dtype), False, scoring)


def _attend_members(
    members: Sequence[FusedPass],
    module: nn.Module,
    rows: Sequence[Tensor],
    window: int | None,
    scoring: Scoring,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend with each request's rows over the contents of its cache, and return the results concatenated by request.

    A context that several caches share is read once for all of their rows (Hydragen, arXiv 2402.05099), unless
    some rows must see all keys at once.

    own: keys and values of all heads that a single member's cache has returned; None: they are read from the caches
    """
    layer = layer_of(module)
    outs: list[Tensor] = [rows[0]] * len(members)
    groups: dict[int, tuple[SharedContext, list[int]]] = {}
    for rank, member in enumerate(members):
        base = member.cache.base
        if base is not None and _sees_all_of_base(member, window):
            groups.setdefault(id(base), (base, []))[1].append(rank)
        else:
            pair = own if own is not None and base is None else member.cache.layer_state(layer)[:2]
            is_watched = member.cache.adjust is not None or OBSERVER.get() is not None
            form = Expanded(module) if is_watched else form_of(module, rows[rank].shape[2])
            out = _attend_fused(member, layer, form.query(rows[rank]), *form.held(pair), window, scoring)
            outs[rank] = form.output(out)
    for base, ranks in groups.values():
        of_group = [rows[rank] for rank in ranks]
        out = _attend_over_base(base, [members[rank] for rank in ranks], module, of_group, scoring)
        for rank, part in zip(ranks, torch.split(out, [query.shape[2] for query in of_group], dim=2), strict=True):
            outs[rank] = part
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend_over_base(
    base: SharedContext, members: Sequence[FusedPass], module: nn.Module, rows: Sequence[Tensor], scoring: Scoring
) -> Tensor:
    """Attend with the rows over the context that their caches share, and merge with each cache's own tokens."""
    layer = layer_of(module)
    form = form_of(module, sum(query.shape[2] for query in rows))
    rows = [form.query(query) for query in rows]
    keys, values = form.held(base.layer_state(layer)[:2])
    shared = attend_part(torch.cat(rows, dim=2), keys, values, False, scoring)
    apart = [
        attend_last(query, *form.held(member.cache.own_state(layer)), scoring)
        for member, query in zip(members, rows, strict=True)
    ]
    return form.output(shared.merge(PartialAttention.join(apart)).complete(scoring.sinks, rows[0].dtype))


def _sees_all_of_base(current: FusedPass, window: int | None) -> bool:
    """Return whether every row sees every token of the context, with plain scores and without an observer."""
    if not current.ordered or current.cache.adjust is not None or OBSERVER.get() is not None:
        return False
    return window is None or current.last_position < window


def _attend_fused(
    current: FusedPass, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scoring: Scoring
) -> Tensor:
    change = current.cache.adjust
    if change is not None:
        scoring = scoring._replace(adjust=lambda scores: change(scores, current.cache.layer_state(layer)[2]))
    positions = current.running
    num_tokens, length = positions.shape[0], key.shape[2]
    if window is not None and current.last_position < window:
        window = None
    _observe(current, layer, query, key, window, scoring)
    if current.ordered and window is None:
        causal = num_tokens == length and num_tokens > 1
        if causal or num_tokens == 1 or (positions.is_cuda and scoring.plain):
            mask = None if causal or num_tokens == 1 else causal_lower_right(num_tokens, length)
            return attend(query, key, value, mask, causal, scoring)
        if has_kernel(key, value, scoring):
            return attend_last(query, key, value, scoring).complete(scoring.sinks, query.dtype)
    parts = [
        attend(
            query[:, :, span.start : span.end],
            key[:, :, : span.num_keys],
            value[:, :, : span.num_keys],
            span.mask,
            False,
            scoring,
        )
        for span in _spans(current, layer, positions, length, window, query.dtype)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _observe(current: FusedPass, layer: int, query: Tensor, key: Tensor, window: int | None, scoring: Scoring) -> None:
    """Call the observer with this attention; the weights are computed only when it requests them."""
    observer, positions = OBSERVER.get(), current.running
    if observer is None:
        return

    def weights(rows: int) -> Tensor:
        total = positions.shape[0]
        mask = additive(_mask(current, layer, positions, total - rows, total, window), torch.float32)
        found = attention_weights(query[:, :, -rows:], key, mask, False, scoring)[0]
        held = current.cache.layer_state(layer)[0].shape[1]  # a single head for all, if they are made of latents
        return found.reshape(held, -1, *found.shape[2:])

    observer(Attended(layer, query, weights))


def _spans(
    current: FusedPass, layer: int, positions: Tensor, length: int, window: int | None, dtype: torch.dtype
) -> list[RowSpan]:
    """Return the pass's mask in spans of rows, each without the keys that no row of the span can see."""
    _, _, key_positions = current.cache.layer_state(layer)
    made = current.masks.get((window, length))
    if made is not None and (current.cache.is_even or torch.equal(made[0], key_positions)):
        return made[1]
    spans, may_look = [], reads_freely(positions)
    step = CPU_SPAN_ROWS if may_look else GPU_SPAN_ROWS
    for start in range(0, positions.shape[0], step):
        end = min(start + step, positions.shape[0])
        mask = _mask(current, layer, positions, start, end, window)
        if may_look and not current.cache.adjust:
            mask = mask[..., : int(mask.flatten(0, -2).any(0).nonzero()[-1]) + 1]
        hides = None if may_look and bool(mask.all()) else additive(mask, dtype)
        spans.append(RowSpan(start, end, mask.shape[-1], hides))
    current.masks[window, length] = (key_positions, spans)
    return spans


def reads_freely(tensor: Tensor) -> bool:
    """Return whether the host can read the tensor at once; on a GPU, all queued work would have to finish first."""
    return tensor.device.type == "cpu"


def _mask(current: FusedPass, layer: int, positions: Tensor, start: int, end: int, window: int | None) -> Tensor:
    """Return the mask of the running rows from `start` to `end` over all keys of the layer; see `visible`."""
    _, _, key_positions = current.cache.layer_state(layer)
    mask = visible(positions[start:end], key_positions, window)
    if current.ordered:
        # Placed keys may carry other positions than their slots (raw reuse): all of them are visible.
        first = key_positions.shape[-1] - positions.shape[0] + start
        mask[..., first:] &= torch.ones_like(mask[..., first:]).tril_()
    return mask
