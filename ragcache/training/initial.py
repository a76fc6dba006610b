"""Initial weights that already copy by match.

From random weights a small transformer sits on a plateau until one head happens to look at the previous token and
another to look for what it carries (Olsson et al. 2022, "induction heads"). Here the first layers start with such
heads, in the manner of mimetic initialisation (Trockman and Kolter 2023); everything is trained from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHARPNESS = 12.0
"""Squared length of each rotary pair in the queries and keys of the previous-token head."""
FIRST_GAIN, OUTPUT_GAIN = 0.05, 0.5
"""Of the outputs of heads that copy what they attend to, in the first layer and the others."""
NUM_FAST = 10
"""Rotary pairs that the previous-token head uses: the fast ones, which tell neighbours apart."""
MATCH_GAIN = 3.0
"""Gain of queries and keys of the matching heads, which use the slow half of the rotary pairs."""


@torch.no_grad()
def start_with_induction(model: Any) -> None:
    """Give head 0 of layer 0 the previous token, and heads 0 and 1 of layer 1 the match for what it carries."""
    first, second = model.model.layers[0], model.model.layers[1]
    for index, layer in enumerate(model.model.layers):
        _attend_to_the_same(layer.self_attn, FIRST_GAIN if index == 0 else OUTPUT_GAIN)
        layer.mlp.down_proj.weight.mul_(0.2)  # or its noise would drown the carried tokens
    common = _add_common_part(model.model.embed_tokens.weight, model.config.initializer_range)
    reads, writes = _look_at_previous(first.self_attn, common, model.model.rotary_emb.inv_freq)
    _match_carried(second.self_attn, reads, writes)


def _add_common_part(embeddings: Tensor, std: float) -> Tensor:
    """Add one vector as long as an embedding to all of them; returns its direction [hidden_size]."""
    direction = torch.nn.functional.normalize(torch.randn(embeddings.shape[1]), dim=0)
    embeddings += direction * std * embeddings.shape[1] ** 0.5
    return direction


def _attend_to_the_same(attention: Any, output_gain: float) -> None:
    """Queries equal keys and outputs undo values: attend to equal tokens and copy them."""
    attention.k_proj.weight.copy_(attention.q_proj.weight)
    attention.o_proj.weight.copy_(attention.v_proj.weight.T * output_gain)


def _look_at_previous(attention: Any, common: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Make head 0 attend one position back. Returns what it reads [head_dim, hidden_size] and writes, transposed.

    Queries and keys read only the common part of the embeddings, so their product depends on distance alone; the
    query is turned back by one position, so the product is largest there.
    """
    dim, size = attention.head_dim, common.shape[0]
    strength = torch.zeros(dim // 2)
    strength[:NUM_FAST] = SHARPNESS**0.5
    read = common / (size / 2) ** 0.5  # after the norm, the common part is about this long
    angles = inv_freq.float()
    attention.k_proj.weight[:dim] = torch.cat([strength, torch.zeros(dim // 2)])[:, None] * read
    attention.q_proj.weight[:dim] = torch.cat([strength * angles.cos(), -strength * angles.sin()])[:, None] * read
    reads, writes = _orthonormal_rows(dim, size), _orthonormal_rows(dim, size)
    reads -= (reads @ common)[:, None] * common
    attention.v_proj.weight[:dim] = reads
    attention.o_proj.weight[:, :dim] = writes.T * 0.15
    return reads, writes


def _match_carried(attention: Any, reads: Tensor, writes: Tensor) -> None:
    """Heads 0 and 1: a token as query, read as the previous-token head reads it, meets a key that carries it."""
    dim = attention.head_dim
    slow = torch.cat([torch.arange(dim // 4, dim // 2), torch.arange(3 * dim // 4, dim)])
    for head in range(2):
        part = slice(head * dim // 2, (head + 1) * dim // 2)
        attention.q_proj.weight[head * dim + slow] = reads[part] * MATCH_GAIN
        attention.k_proj.weight[head * dim + slow] = writes[part] * MATCH_GAIN


def _orthonormal_rows(rows: int, columns: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(columns, rows)).Q
    return basis.T
