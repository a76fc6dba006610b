"""Initial weights that already copy by match.

From random weights, the loss of a small transformer stays on a plateau until a head happens to attend to the previous
token, and another head to attend to tokens by what the first head wrote (Olsson et al. 2022, "induction heads"). Here
the first layers begin with such heads, like mimetic initialisation (Trockman and Kolter 2023); all weights are trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST_GAIN, OUTPUT_GAIN = 0.05, 0.5
"""Gain of the outputs of heads that copy the tokens they attend to: in the first layer, and in the others."""
LOOKING_BACK = ((1, 12.0, slice(0, 10)), (2, 14.0, slice(0, 12)), (3, 14.0, slice(0, 12)), (4, 14.0, slice(0, 12)))
"""For each head of the first layer: how far back it looks, the squared length of a rotary pair in its queries and keys,
and the pairs that it uses: the fast ones, which tell neighbours apart."""
WRITE_GAIN = 0.2
"""Gain of these heads' outputs, which are then about as long as an embedding."""
MATCHED = (0, 3, 1, 2)
"""The distance that each head of the second layer matches: 0, the token itself; 3, a name before its predicate."""
MATCH_GAIN = 3.0
"""Gain of queries and keys of the matching heads, which use the slow half of the rotary pairs."""


@torch.no_grad()
def start_with_induction(model: Any) -> None:
    """Make the first layer carry tokens a few places forward, and the second layer match the carried tokens."""
    first, second = model.model.layers[0], model.model.layers[1]
    for index, layer in enumerate(model.model.layers):
        _attend_to_the_same(layer.self_attn, FIRST_GAIN if index == 0 else OUTPUT_GAIN)
        layer.mlp.down_proj.weight.mul_(0.2)  # otherwise its noise would hide the carried tokens
    common = _add_common_part(model.model.embed_tokens.weight, model.config.initializer_range)
    reads, writes = _look_back(first.self_attn, common, model.model.rotary_emb.inv_freq.float())
    _match_carried(second.self_attn, reads, writes)


def _add_common_part(embeddings: Tensor, std: float) -> Tensor:
    """Add a vector as long as an embedding to all embeddings; return its direction, [hidden_size]."""
    direction = torch.nn.functional.normalize(torch.randn(embeddings.shape[1]), dim=0)
    embeddings += direction * std * embeddings.shape[1] ** 0.5
    return direction


def _attend_to_the_same(attention: Any, output_gain: float) -> None:
    """Make heads attend to equal tokens and copy them: queries equal keys, and outputs undo values."""
    attention.k_proj.weight.copy_(attention.q_proj.weight)
    attention.o_proj.weight.copy_(attention.v_proj.weight.T * output_gain)


def _look_back(attention: Any, common: Tensor, inv_freq: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Make each head attend to the token at its offset before, and carry that token forward.

    Queries and keys read only the common part of the embeddings, so their product depends on the distance alone; the
    query is rotated back by the offset, so the product is largest there.

    Returns the directions that all heads read, [rows, hidden_size], and the directions that each head writes.
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
    """Make each head attend to tokens that followed the same context earlier in the text.

    A query reads the token at the head's distance before its own place, and a key reads the token one place further
    before its own: these tokens are equal if the key's token follows a context like the query's. values, writes: see
    `_look_back`
    """
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
