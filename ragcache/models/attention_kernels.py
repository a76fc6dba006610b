"""Attention of some rows over some keys: which computation is the fastest, and the explicit one where none other can.

Softmax(cap(q k^T * scaling)) v, grouped-query, with KV heads unrepeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_sdpa = nn.functional.scaled_dot_product_attention
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# A task of the kernel: so many rows of one head. Few tasks that are no multiple of the threads leave some idle: three
# heads on two threads took 33 ms instead of 26 for eight rows behind 5,000 tokens in 30 layers.
KERNEL_ROWS = 32
EVEN_TASKS = 8  # tasks a thread from which on it no longer matters
LEAST_PIECE = 256


class Scoring(NamedTuple):
    """How a layer turns the products of queries and keys into weights.

    scaling: factor of the products
    softcap: Gemma 2's cap of the scores; None: none
    sinks:   float [num_heads], GPT-OSS's score of a key that is not there; None: none
    adjust:  changes capped and masked scores, float32 [batch, num_kv_heads, groups, num_rows, length]; None: nothing
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    adjust: Callable[[Tensor], Tensor] | None = None

    @property
    def plain(self) -> bool:
        """Nothing but the scaling: what PyTorch's kernels compute."""
        return self.softcap is None and self.sinks is None and self.adjust is None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scoring: Scoring) -> Tensor:
    """query: [batch, num_heads, num_rows, head_dim]; key, value: [batch, num_kv_heads, length, head_dim].

    mask: see `additive`; None: every key is visible, or with `causal` as many as rows, the later ones last
    Returns [batch, num_heads, num_rows, head_dim].
    """
    if not scoring.plain:
        return attend_explicitly(query, key, value, mask, causal, scoring)
    if mask is None and not causal and has_kernel(key, value, scoring):
        return _attend_folded(query, key, value, scoring.scaling)[0].to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    if type(mask) is Tensor and mask.dim() == 3:
        mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 0)[None]
    if type(mask) is Tensor and key.is_cuda and grouped:
        # A masked grouped call falls back to the slow kernel on CUDA; repeating the heads does not.
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return _sdpa(query, key, value, attn_mask=mask, is_causal=causal, scale=scoring.scaling, enable_gqa=grouped)


class PartialAttention(NamedTuple):
    """Attention over some of the keys, to be merged with that over the others.

    out: float32 [batch, num_heads, num_rows, head_dim], as if there were no other keys
    lse: float32 [batch, num_heads, num_rows], the logarithm of the sum of the exponentiated scores
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def join(cls, parts: Sequence[PartialAttention]) -> PartialAttention:
        """The parts of several requests' rows as one."""
        return cls(torch.cat([part.out for part in parts], dim=2), torch.cat([part.lse for part in parts], dim=2))

    def merge(self, other: PartialAttention) -> PartialAttention:
        """Attention of the same rows over the keys of both."""
        lse = torch.logaddexp(self.lse, other.lse)
        out = self.out * (self.lse - lse).exp()[..., None] + other.out * (other.lse - lse).exp()[..., None]
        return PartialAttention(out, lse)

    def complete(self, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What attention returns once all keys are in."""
        if sinks is None:
            return self.out.to(dtype)
        return (self.out * (self.lse - sinks.float().view(1, -1, 1)).sigmoid()[..., None]).to(dtype)


def has_kernel(key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Whether a kernel computes a part of attention, sinks aside: without one, its weights stand in memory."""
    no_changes = scoring.softcap is None and scoring.adjust is None
    return no_changes and key.device.type == "cpu" and key.shape[3] == value.shape[3]


def attend_last(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> PartialAttention:
    """Attention of the tokens that the last keys belong to: each sees all keys up to its own; see `attend_part`.

    Two parts, earlier keys without a mask and own ones: for 1,024 rows behind 5,000 tokens half the time of one part
    under a mask.
    """
    if query.shape[2] == 1:
        return attend_part(query, key, value, False, scoring)
    earlier = key.shape[2] - query.shape[2]
    own = attend_part(query, key[:, :, earlier:], value[:, :, earlier:], True, scoring)
    if not earlier:
        return own
    return attend_part(query, key[:, :, :earlier], value[:, :, :earlier], False, scoring).merge(own)


def attend_part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scoring: Scoring) -> PartialAttention:
    """`attend` over some of the keys, without the sinks and changes of scores that hold for all of them.

    causal: as many keys as rows, the later ones last; False: every row sees every key
    """
    if has_kernel(key, value, scoring):
        attended = _attend_causally if causal else _attend_folded
        return PartialAttention(*(one.float() for one in attended(query, key, value, scoring.scaling)))
    scores = _scores(query, key, None, causal, scoring)
    lse = scores.logsumexp(-1)
    out = torch.matmul((scores - lse[..., None]).exp().to(value.dtype).flatten(2, 3), value)
    return PartialAttention(out.float().reshape(*query.shape[:3], -1), lse.flatten(1, 2))


def _attend_folded(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Every row over every key on a CPU, and the logarithm of the sum of exponentiated scores. The query heads of a KV
    head are rows of it: keys are read once for all of them, and for all requests."""
    batch, num_heads, num_rows, width = query.shape
    folded = query.reshape(batch, key.shape[1], -1, width)
    pieces = _num_pieces(folded, key)
    if pieces == 1:
        out, lse = _flash_on_cpu(folded, key, value, 0.0, False, attn_mask=None, scale=scaling)
    else:
        out, lse = _attend_in_pieces(folded, key, value, scaling, pieces)
    return out.reshape(batch, num_heads, num_rows, -1), lse.reshape(batch, num_heads, num_rows)


def _num_pieces(folded: Tensor, key: Tensor) -> int:
    """Into how many pieces the keys are cut so that all threads get as many of the kernel's tasks."""
    batch, num_kv_heads, num_rows, _ = folded.shape
    threads = torch.get_num_threads()
    tasks = num_kv_heads * -(-num_rows // KERNEL_ROWS)
    if batch > 1 or tasks >= EVEN_TASKS * threads:
        return 1
    return max(1, min(threads // math.gcd(tasks, threads), key.shape[2] // LEAST_PIECE))


def _attend_in_pieces(folded: Tensor, key: Tensor, value: Tensor, scaling: float, pieces: int) -> tuple[Tensor, Tensor]:
    """`_attend_folded` of one request over pieces of its keys, merged (flash decoding: Dao et al., 2023).

    Returns float32 [1, num_kv_heads, num_rows, head_dim] and [1, num_kv_heads, num_rows].
    """
    size = key.shape[2] // pieces
    even = size * pieces
    shape = (key.shape[1], pieces, size, key.shape[3])
    cut_key, cut_value = (one[0, :, :even].view(shape).transpose(0, 1) for one in (key, value))
    rows = folded.expand(pieces, -1, -1, -1)
    outs, lses = _flash_on_cpu(rows, cut_key, cut_value, 0.0, False, attn_mask=None, scale=scaling)
    lse = lses.logsumexp(0, keepdim=True)
    part = PartialAttention((outs * (lses - lse).exp()[..., None]).sum(0, keepdim=True), lse)
    if even < key.shape[2]:
        rest = _flash_on_cpu(folded, key[:, :, even:], value[:, :, even:], 0.0, False, attn_mask=None, scale=scaling)
        part = part.merge(PartialAttention(*rest))
    return part


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Every row over the keys up to its own, as many keys as rows, on a CPU; returns what `_attend_folded` does."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    attended: tuple[Tensor, Tensor] = _flash_on_cpu(query, key, value, 0.0, True, attn_mask=None, scale=scaling)
    return attended


def attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scoring: Scoring
) -> Tensor:
    """`attend` written out: for what no kernel computes."""
    batch, num_heads, num_tokens, _ = query.shape
    weights = attention_weights(query, key, mask, causal, scoring)
    weights = weights.to(value.dtype).view(batch, key.shape[1], -1, key.shape[2])
    return torch.matmul(weights, value).view(batch, num_heads, num_tokens, -1)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scoring: Scoring) -> Tensor:
    """Softmax(cap(q k^T * scaling)): float32 [batch, num_kv_heads, groups, num_tokens, length]."""
    scores = _scores(query, key, mask, causal, scoring)
    if scoring.adjust is not None:
        scores = scoring.adjust(scores)
    if scoring.sinks is None:
        return scores.softmax(-1)
    column = scoring.sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scoring: Scoring) -> Tensor:
    """cap(q k^T * scaling), masked: float32 [batch, num_kv_heads, groups, num_tokens, length], with the query heads of
    one KV head folded into its rows, so that no head repeats."""
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
    """bool [num_queries, num_keys]: keys at or before the query and, in a sliding layer, less than `window` back.

    [num_kv_heads, num_queries, num_keys] for key positions [num_kv_heads, num_keys]: after eviction heads may differ.
    """
    distance = query_positions[:, None] - key_positions[..., None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, the lowest value elsewhere. Made once a pass: a boolean mask is converted in every layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
