"""Initial weights that already copy by match.

From random weights a small transformer sits on a plateau until one head happens to look at the previous token and
another to look for what it carries (Olsson et al. 2022, "induction heads"). Here the first layers start with such
heads, in the manner of mimetic initialisation (Trockman and Kolter 2023); everything is trained from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST_GAIN, OUTPUT_GAIN = 0.05, 0.5
"""Gain of the outputs of heads that copy what they attend to: in the first layer, and in the others."""
LOOKING_BACK = ((1, 12.0, slice(0, 10)), (2, 14.0, slice(0, 12)), (3, 14.0, slice(0, 12)), (4, 14.0, slice(0, 12)))
"""For each head of the first layer: how far back it looks, the squared length of a rotary pair in its queries and keys,
and the pairs that it uses: the fast ones, which tell neighbours apart."""
WRITE_GAIN = 0.2
"""Gain of what these heads write, which is then about as long as an embedding."""
MATCHED = (0, 3, 1, 2)
"""The distance that each head of the second layer matches: 0, the token itself; 3, a name before its predicate."""
MATCH_GAIN = 3.0
"""Gain of queries and keys of the matching heads, which use the slow half of the rotary pairs."""


@torch.no_grad()
def start_with_induction(model: Any) -> None:
    """Let the first layer look a few tokens back, and the second match what it carries."""
    first, second = model.model.layers[0], model.model.layers[1]
    for index, layer in enumerate(model.model.layers):
        _attend_to_the_same(layer.self_attn, FIRST_GAIN if index == 0 else OUTPUT_GAIN)
        layer.mlp.down_proj.weight.mul_(0.2)  # or its noise would drown the carried tokens
    common = _add_common_part(model.model.embed_tokens.weight, model.config.initializer_range)
    reads, writes = _look_back(first.self_attn, common, model.model.rotary_emb.inv_freq.float())
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


def _look_back(attention: Any, common: Tensor, inv_freq: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Make each head attend its offset back. Returns what they read [rows, hidden_size] and what each writes.

    Queries and keys read only the common part of the embeddings, so their product depends on distance alone; the
    query is turned back by the offset, so the product is largest there.
    """
    dim, size = attention.head_dim, common.shape[0]
    heads = attention.q_proj.weight.shape[0] // dim
    read = common / (size / 2) ** 0.5  # after the norm, the common part is about this long
    values = _orthonormal_rows(dim // 2, size)
    values -= (values @ common)[:, None] * common
    writes = list(torch.split(_orthonormal_rows(dim // 2 * heads, size), dim // 2))
    for head, (offset, sharpness, pairs) in zip(range(heads), LOOKING_BACK, strict=False):
        rows = slice(head * dim, (head + 1) * dim)
        strength = torch.zeros(dim // 2)
        strength[pairs] = sharpness**0.5
        turn = inv_freq * offset
        attention.k_proj.weight[rows] = torch.cat([strength, torch.zeros(dim // 2)])[:, None] * read
        attention.q_proj.weight[rows] = torch.cat([strength * turn.cos(), -strength * turn.sin()])[:, None] * read
        attention.v_proj.weight[head * dim : head * dim + dim // 2] = values
        attention.o_proj.weight[:, head * dim : head * dim + dim // 2] = writes[head].T * WRITE_GAIN
    return values, writes


def _match_carried(attention: Any, values: Tensor, writes: list[Tensor]) -> None:
    """Heads that find the token before which the same stood at the same distance as before the one to come."""
    dim = attention.head_dim
    slow = torch.cat([torch.arange(dim // 4, dim // 2), torch.arange(3 * dim // 4, dim)])
    carried = [values, *writes]
    for head, distance in zip(range(attention.q_proj.weight.shape[0] // dim), MATCHED, strict=False):
        if distance + 1 < len(carried):
            attention.q_proj.weight[head * dim + slow] = carried[distance] * MATCH_GAIN
            attention.k_proj.weight[head * dim + slow] = carried[distance + 1] * MATCH_GAIN


def _orthonormal_rows(rows: int, columns: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(columns, rows)).Q
    return basis.T
