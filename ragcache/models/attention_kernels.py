"""Attention of some rows over some keys: the fastest computation for each case, and an explicit version for all others.

Softmax(cap(q k^T * scaling)) v, grouped-query, with KV heads unrepeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ragcache.models.attention_on_cpu import attend_on_cpu

_sdpa = nn.functional.scaled_dot_product_attention
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# A task of the kernel covers this many rows of a head. Few tasks that are no multiple of the threads leave some idle:
# three heads on two threads took 33 ms instead of 26 for eight rows after 5,000 tokens in 30 layers.
KERNEL_ROWS = 32
EVEN_TASKS = 8  # tasks per thread from which on an uneven split does not matter
LEAST_PIECE = 256


class Scoring(NamedTuple):
    """How a layer turns the products of queries and keys into weights.

    scaling: factor of the products
    softcap: Gemma 2's cap of the scores; None: none
    sinks:   float [num_heads], GPT-OSS's score of a key that does not exist; None: none
    adjust:  changes capped and masked scores, float32 [batch, num_kv_heads, groups, num_rows, length]; None: nothing
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    adjust: Callable[[Tensor], Tensor] | None = None

    @property
    def plain(self) -> bool:
        """Return whether the scores are only scaled, as PyTorch's kernels compute them."""
        return self.softcap is None and self.sinks is None and self.adjust is None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scoring: Scoring) -> Tensor:
    """Compute attention by the fastest computation available.

    query: [batch, num_heads, num_rows, head_dim]; key, value: [batch, num_kv_heads, length, head_dim].
    mask: see `additive`; None: every key is visible, or with `causal` each row sees the keys up to its own
    causal: whether each row sees only the keys up to its own; there are as many keys as rows

    Returns [batch, num_heads, num_rows, head_dim].
    """
    if not scoring.plain:
        return attend_explicitly(query, key, value, mask, causal, scoring)
    if mask is None and not causal and has_kernel(key, value, scoring):
        return _attend_folded(query, key, value, scoring.scaling)[0].to(query.dtype)
    if mask is None and causal and (own := attend_own(query, key, value, scoring)) is not None:
        return own.out.to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    if type(mask) is Tensor and mask.dim() == 3:
        mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 0)[None]
    if type(mask) is Tensor and key.is_cuda and grouped:
        # A masked grouped call falls back to the slow kernel on CUDA; repeating the heads does not.
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return _sdpa(query, key, value, attn_mask=mask, is_causal=causal, scale=scoring.scaling, enable_gqa=grouped)


class PartialAttention(NamedTuple):
    """Attention over some of the keys, to be merged with the attention over the others.

    out: float32 [batch, num_heads, num_rows, head_dim], as if there were no other keys
    lse: float32 [batch, num_heads, num_rows], the logarithm of the sum of the exponentiated scores
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def join(cls, parts: Sequence[PartialAttention]) -> PartialAttention:
        """Concatenate the rows of several requests."""
        return cls(torch.cat([part.out for part in parts], dim=2), torch.cat([part.lse for part in parts], dim=2))

    def merge(self, other: PartialAttention) -> PartialAttention:
        """Return the attention of the same rows over the keys of both."""
        lse = torch.logaddexp(self.lse, other.lse)
        out = self.out * (self.lse - lse).exp()[..., None] + other.out * (other.lse - lse).exp()[..., None]
        return PartialAttention(out, lse)

    def complete(self, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the final attention, once all keys are merged: apply the sinks and convert to `dtype`."""
        if sinks is None:
            return self.out.to(dtype)
        return (self.out * (self.lse - sinks.float().view(1, -1, 1)).sigmoid()[..., None]).to(dtype)


def has_kernel(key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Return whether a kernel can compute `attend_part` for these keys; otherwise it holds all weights in memory.

    Sinks do not matter, because they are applied to the merged parts.
    """
    no_changes = scoring.softcap is None and scoring.adjust is None
    return no_changes and key.device.type == "cpu" and key.shape[3] == value.shape[3]


def attend_own(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> PartialAttention | None:
    """Compute `attend_last` by our own kernel; return None if the kernel is not available for these tensors."""
    attended = None
    if has_kernel(key, value, scoring):
        attended = attend_on_cpu(query, key, value, query.shape[2], scoring.scaling)
    return None if attended is None else PartialAttention(*attended)


def attend_last(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> PartialAttention:
    """Compute the attention of rows whose own keys are the last keys, so that each row sees all keys up to its own.

    PyTorch's kernels compute it in two parts, the earlier keys, which need no mask, and the rows' own keys: for 1,024
    rows after 5,000 tokens this takes half the time of a single part with a mask. See `attend_part` for the result.
    """
    if query.shape[2] == 1:
        return attend_part(query, key, value, False, scoring)
    if (attended := attend_own(query, key, value, scoring)) is not None:
        return attended
    earlier = key.shape[2] - query.shape[2]
    own = attend_part(query, key[:, :, earlier:], value[:, :, earlier:], True, scoring)
    if not earlier:
        return own
    return attend_part(query, key[:, :, :earlier], value[:, :, :earlier], False, scoring).merge(own)


def attend_part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scoring: Scoring) -> PartialAttention:
    """Compute `attend` over some of the keys, without the sinks and score changes that apply to all keys together.

    causal: whether each row sees only the keys up to its own, of as many keys as rows; False: every row sees every key
    """
    if has_kernel(key, value, scoring):
        attended = _attend_causally if causal else _attend_folded
        return PartialAttention(*(tensor.float() for tensor in attended(query, key, value, scoring.scaling)))
    scores = _scores(query, key, None, causal, scoring)
    lse = scores.logsumexp(-1)
    out = torch.matmul((scores - lse[..., None]).exp().to(value.dtype).flatten(2, 3), value)
    return PartialAttention(out.float().reshape(*query.shape[:3], -1), lse.flatten(1, 2))


def _attend_folded(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attend with every row to every key on a CPU; also return the logarithm of the sum of exponentiated scores.

    The query heads of a KV head become its rows, so that keys are read once for all query heads and all requests.
    """
    if attended := attend_on_cpu(query, key, value, 0, scaling):
        return attended
    batch, num_heads, num_rows, width = query.shape
    folded = query.reshape(batch, key.shape[1], -1, width)
    pieces = _num_pieces(folded, key)
    if pieces == 1:
        out, lse = _flash_on_cpu(folded, key, value, 0.0, False, attn_mask=None, scale=scaling)
    else:
        out, lse = _attend_in_pieces(folded, key, value, scaling, pieces)
    return out.reshape(batch, num_heads, num_rows, -1), lse.reshape(batch, num_heads, num_rows)


def _num_pieces(folded: Tensor, key: Tensor) -> int:
    """Return the number of pieces to cut the keys into so that all threads get equally many kernel tasks."""
    batch, num_kv_heads, num_rows, _ = folded.shape
    threads = torch.get_num_threads()
    tasks = num_kv_heads * -(-num_rows // KERNEL_ROWS)
    if batch > 1 or tasks >= EVEN_TASKS * threads:
        return 1
    return max(1, min(threads // math.gcd(tasks, threads), key.shape[2] // LEAST_PIECE))


def _attend_in_pieces(folded: Tensor, key: Tensor, value: Tensor, scaling: float, pieces: int) -> tuple[Tensor, Tensor]:
    """Compute `_attend_folded` of a single request over pieces of its keys, merged (flash decoding: Dao et al., 2023).

    Returns float32 [1, num_kv_heads, num_rows, head_dim] and [1, num_kv_heads, num_rows].
    """
    size = key.shape[2] // pieces
    even = size * pieces
    shape = (key.shape[1], pieces, size, key.shape[3])
    cut_key, cut_value = (tensor[0, :, :even].view(shape).transpose(0, 1) for tensor in (key, value))
    rows = folded.expand(pieces, -1, -1, -1)
    outs, lses = _flash_on_cpu(rows, cut_key, cut_value, 0.0, False, attn_mask=None, scale=scaling)
    lse = lses.logsumexp(0, keepdim=True)
    part = PartialAttention((outs * (lses - lse).exp()[..., None]).sum(0, keepdim=True), lse)
    if even < key.shape[2]:
        rest = _flash_on_cpu(folded, key[:, :, even:], value[:, :, even:], 0.0, False, attn_mask=None, scale=scaling)
        part = part.merge(PartialAttention(*rest))
    return part


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Compute `_attend_folded` with as many keys as rows, where each row sees only the keys up to its own."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    attended: tuple[Tensor, Tensor] = _flash_on_cpu(query, key, value, 0.0, True, attn_mask=None, scale=scaling)
    return attended


def attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scoring: Scoring
) -> Tensor:
    """Compute `attend` without a kernel, for scores that no kernel supports."""
    batch, num_heads, num_tokens, _ = query.shape
    weights = attention_weights(query, key, mask, causal, scoring)
    weights = weights.to(value.dtype).view(batch, key.shape[1], -1, key.shape[2])
    return torch.matmul(weights, value).view(batch, num_heads, num_tokens, -1)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scoring: Scoring) -> Tensor:
    """Compute softmax(cap(q k^T * scaling)): float32 [batch, num_kv_heads, groups, num_tokens, length]."""
    scores = _scores(query, key, mask, causal, scoring)
    if scoring.adjust is not None:
        scores = scoring.adjust(scores)
    if scoring.sinks is None:
        return scores.softmax(-1)
    column = scoring.sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scoring: Scoring) -> Tensor:
    """Compute cap(q k^T * scaling), masked: float32 [batch, num_kv_heads, groups, num_tokens, length].

    The query heads of a KV head are folded into its rows, so that no head is repeated.
    """
    batch, num_heads, num_tokens, width = query.shape
    folded = query.reshape(batch, key.shape[1], -1, width)
    scores = torch.matmul(folded * scoring.scaling, key.transpose(2, 3)).float()
    scores = scores.view(batch, key.shape[1], num_heads // key.shape[1], num_tokens, -1)
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if causal:
        positions = torch.arange(num_tokens, device=key.device)
        mask = additive(visible(positions, positions, None), scores.dtype)
    if mask is not None:
        scores += mask if mask.dim() == 2 else mask[:, None]
    return scores


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Return bool [num_queries, num_keys]: keys at or before the query, in a sliding layer less than `window` back.

    Key positions [num_kv_heads, num_keys] give [num_kv_heads, num_queries, num_keys]: heads may hold other tokens.
    """
    distance = query_positions[:, None] - key_positions[..., None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: 0 for visible keys, the lowest value for others.

    It is made once per pass, since a boolean mask would be converted in every layer.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
