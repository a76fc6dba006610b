"""The attention function that transformers calls in place of its own.

Registered under "ragcache" through transformers' public AttentionInterface. It keeps KV heads unrepeated, reads keys
where they are placed, and takes visibility from token positions instead of a prepared mask.

Two kinds of pass run through it:

- an *encode* pass reads chunks alone. The rotary module hands out the identity, so the keys that arrive are final but
  not rotated; they are recorded, and rotated here with the family's own function.
- a *fused* pass runs tokens over a FusedCache. The model rotates them itself; placed keys are already rotated.

The current pass travels in a ContextVar: one model serves several threads at once.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from ragcache.kv.cache import FusedCache
from ragcache.kv.rope import Rope

NAME = "ragcache"
_sdpa = nn.functional.scaled_dot_product_attention


@dataclass(eq=False)
class EncodePass:
    """Chunks read alone, or behind a shared prefix.

    rope:   None in a plain pass, where the model rotates its keys itself
    prefix: rotated keys and values of the prefix by layer, [1, num_kv_heads, prefix_tokens, head_dim]; empty for none
    angles: cos and sin by layer type, as the model computed them; filled by the rotary hook
    windows: the sliding window that each layer asked for; None where it sees everything
    """

    rope: Rope | None
    prefix: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    angles: dict[str | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)


@dataclass(eq=False)
class FusedPass:
    """Tokens run over a cache.

    positions: int64 [num_tokens] of the tokens that run
    appended:  they come after everything in the cache, in order, so that the last columns alone need a mask
    masks:     additive masks made so far, by (window, layer length): most layers share one
    """

    cache: FusedCache
    positions: Tensor
    appended: bool
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)


CURRENT: ContextVar[EncodePass | FusedPass | None] = ContextVar("ragcache_pass", default=None)


def register() -> None:
    """Make `attn_implementation="ragcache"` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, attention)


def hook_rotary(rotary: nn.Module) -> None:
    """During an encode pass the rotary module hands out the identity and its true angles are kept for `attention`."""
    rotary.register_forward_hook(_identity_angles, with_kwargs=True)


def _identity_angles(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    current = CURRENT.get()
    if not isinstance(current, EncodePass) or current.rope is None:
        return None
    kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
    cos, sin = output
    current.angles[kind] = (cos, sin)
    return torch.ones_like(cos), torch.zeros_like(sin)


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
    """query: [batch, num_heads, num_tokens, head_dim]; key, value: [batch, num_kv_heads, length, head_dim].

    Returns [batch, num_tokens, num_heads, head_dim], as transformers' own attention functions do.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    current = CURRENT.get()
    layer: int = module.layer_idx  # type: ignore[assignment]
    mask: Tensor | None
    if isinstance(current, EncodePass):
        query, key, value, mask, causal = _encode_inputs(current, layer, query, key, value, sliding_window)
    elif isinstance(current, FusedPass):
        mask, causal = _fused_mask(current, layer, key.shape[2], sliding_window, query.dtype)
    else:
        mask, causal = attention_mask, attention_mask is None and query.shape[2] > 1
    out = _attend(query, key, value, mask, causal, scaling, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _encode_inputs(
    current: EncodePass, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    current.windows[layer] = window
    if current.rope is not None and current.rope.rotated[layer]:
        cos, sin = current.angles[current.rope.layer_type(layer)]
        query, key = current.rope.apply(query, key, cos, sin)
    num_tokens = query.shape[2]
    if current.prefix:
        prefix_keys, prefix_values = current.prefix[layer]
        key = torch.cat([prefix_keys.expand(key.shape[0], -1, -1, -1), key], dim=2)
        value = torch.cat([prefix_values.expand(value.shape[0], -1, -1, -1), value], dim=2)
    length = key.shape[2]
    windowed = window is not None and length > window
    if length == num_tokens and not windowed:
        return query, key, value, None, True
    positions = torch.arange(length, device=key.device)
    mask = visible(positions[-num_tokens:], positions, window if windowed else None)
    return query, key, value, additive(mask, query.dtype), False


def _fused_mask(
    current: FusedPass, layer: int, length: int, window: int | None, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    """(mask, is_causal). A mask is built only where the shape of the pass does not already say what is visible."""
    num_tokens = current.positions.shape[0]
    windowed = window is not None and int(current.positions[-1]) >= window
    if current.appended and not windowed:
        if num_tokens == 1:
            return None, False
        if num_tokens == length:
            return None, True
        if current.positions.is_cuda:
            return causal_lower_right(num_tokens, length), False
    shared = (window if windowed else None, length)
    if not current.appended or shared not in current.masks:
        _, _, key_positions = current.cache.layer_state(layer)
        mask = visible(current.positions, key_positions, shared[0])
        if current.appended:
            # Placed keys may carry other positions than their slots (raw reuse): all of them are visible.
            mask[:, -num_tokens:].logical_and_(torch.ones_like(mask[:, -num_tokens:]).tril_())
        current.masks[shared] = additive(mask, dtype)
    return current.masks[shared], False


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """bool [num_queries, num_keys]: keys at or before the query and, in a sliding layer, less than `window` back."""
    distance = query_positions[:, None] - key_positions[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, the lowest value elsewhere. Made once a pass: a boolean mask is converted in every layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if softcap is not None or sinks is not None:
        return _attend_explicitly(query, key, value, mask, causal, scaling, softcap, sinks)
    few = query.shape[2] * 4 < key.shape[2]
    if few and key.device.type == "cpu" and key.dtype != torch.float32 and not causal:
        # Half-precision matrix products are far faster than the fused kernel on a CPU for a short suffix.
        return _attend_explicitly(query, key, value, mask, causal, scaling, None, None)
    grouped = query.shape[1] != key.shape[1]
    if mask is not None and key.is_cuda and grouped and isinstance(mask, Tensor) and type(mask) is Tensor:
        # A masked grouped call falls back to the slow kernel on CUDA; repeating the heads does not.
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return _sdpa(query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped)


def _attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax(cap(q k^T * scaling)) v with the query heads of one KV head folded into its rows, so no head repeats."""
    batch, num_heads, num_tokens, width = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    folded = query.reshape(batch, num_kv_heads, groups * num_tokens, width)
    scores = torch.matmul(folded * scaling, key.transpose(2, 3)).float()
    scores = scores.view(batch, num_kv_heads, groups, num_tokens, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        positions = torch.arange(num_tokens, device=key.device)
        mask = additive(visible(positions, positions, None), scores.dtype)
    if mask is not None:
        scores += mask
    if sinks is not None:
        column = sinks.float().view(1, num_kv_heads, groups, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.to(value.dtype).view(batch, num_kv_heads, groups * num_tokens, -1)
    return torch.matmul(weights, value).view(batch, num_heads, num_tokens, -1)
