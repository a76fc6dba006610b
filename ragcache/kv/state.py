"""States of recurrent layers: how a chunk changes them, and their values after several chunks.

A recurrent layer (gated delta rule, arXiv 2412.06464; Mamba-2, arXiv 2405.21060) turns the state S before a chunk into
P S + Q, where P and Q depend only on the chunk's inputs. A block keeps both, and the last inputs of the layer's short
convolution. Blocks are joined in any order by applying their maps in that order: no token runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ragcache.kv.cache_shape import StateShape
from ragcache.lazy_torch import Tensor, torch

_LEVELS = 127  # of int8 in a rounded map, on either side of zero


class State(NamedTuple):
    """The state of a recurrent layer. It is never written to.

    conv:  window of the convolution, [batch, channels, width], zeros before the first token
    state: [batch, num_heads, rows, columns]; None if the layer has none
    """

    conv: Tensor
    state: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.conv.nbytes + (0 if self.state is None else self.state.nbytes)

    def expand(self, batch: int) -> State:
        """Return the same state for every row of a batch."""
        state = None if self.state is None else self.state.expand(batch, -1, -1, -1)
        return State(self.conv.expand(batch, -1, -1), state)


@dataclass(frozen=True, eq=False)
class StateMap:
    """How a chunk changes the state of a recurrent layer: S becomes P S + Q.

    p:    [num_heads, rows, rows], or [num_heads, 1, 1] if it is a single number for each head; None if the layer has no
          state
    q:    [num_heads, rows, columns]
    tail: the convolution's last inputs, [channels, min(num_tokens, width)]
    p_scales, q_scales: [num_heads, rows, 1], of p and q in int8; None if p or q is not in int8 (see `rounded`)
    """

    p: Tensor | None
    q: Tensor | None
    tail: Tensor
    p_scales: Tensor | None = None
    q_scales: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def map(self, change: Callable[[Tensor], Tensor]) -> StateMap:
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors.items()})

    def rounded(self) -> StateMap:
        """Return the map in int8, with a float32 scale for each row.

        The tail, rows of a single number, and tensors that are in int8 already stay unchanged.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if name in ("p", "q") and tensor.is_floating_point() and tensor.shape[-1] > 1:
                scales = tensor.abs().amax(-1, keepdim=True) / _LEVELS
                scales[scales == 0] = 1
                found |= {name: (tensor / scales).round_().to(torch.int8), f"{name}_scales": scales}
        return replace(self, **found)

    @property
    def bound(self) -> float:
        """Return the largest absolute error of a number in a rounded map; 0.0 for a map that is not rounded."""
        steps = [float(scales.max()) for scales in (self.p_scales, self.q_scales) if scales is not None]
        return max(steps, default=0.0) * (0.5 + 2.0**-12)

    def fits(self, shape: StateShape, num_tokens: int) -> bool:
        """Return whether this is a map of a layer of this shape, over `num_tokens` tokens."""
        heads, rows, _ = shape.state or (0, 0, 0)
        wide = rows if shape.is_matrix else 1
        found = (None if tensor is None else tuple(tensor.shape) for tensor in (self.p, self.q, self.tail))
        expected = (shape.state and (heads, wide, wide), shape.state, (shape.conv[0], min(num_tokens, shape.conv[1])))
        return tuple(found) == expected

    def advance(self, state: Tensor | None) -> Tensor | None:
        """Return the state after the chunk, [batch, num_heads, rows, columns].

        state: the state before the chunk; None: there are no earlier tokens
        """
        if self.p is None or self.q is None:
            return None
        p = self.p if self.p_scales is None else self.p * self.p_scales
        q = self.q if self.q_scales is None else self.q * self.q_scales
        if state is None:
            return q[None]
        return (p @ state if p.shape[-1] > 1 else p * state) + q


def compose(before: State | None, maps: Sequence[StateMap], width: int, device: torch.device) -> State:
    """Return the state after chunks in this order, on `device`, for a batch of one.

    before: the state before the first chunk; None: there are no earlier tokens
    maps:   the chunks' maps, on any device
    width:  width of the convolution's window
    """
    state, tails = (None, []) if before is None else (before.state, [before.conv[0]])
    for chunk_map in maps:
        here = chunk_map.map(lambda held: held.to(device))
        state = here.advance(state)
        tails.append(here.tail)
    conv = torch.cat(tails, dim=-1)[..., -width:]
    return State(torch.nn.functional.pad(conv, (width - conv.shape[-1], 0))[None], state)
