"""Rotary positions, taken from the model's own rotary module.

Keys are stored before RoPE and rotated when they are placed. cos and sin come from the model and include
`attention_scaling` (YaRN), so a key is scaled once; `unrotate` removes the scale again. Rotation runs in float32.

RoPE: Su et al., "RoFormer" (arXiv 2104.09864), eq. 15; the pairing (halves, interleaved, partial) is that of the
family's `apply_rotary_pos_emb`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Source = tuple[nn.Module, str | None]
_TABLE_STEP = 1024


class Angles(NamedTuple):
    """cos and sin, float32 [num_tokens, width], attention scaling included; [num_kv_heads, num_tokens, width] if heads
    hold tokens of different positions.

    half: the family pairs dimension d with d + half, and width is half; None: another pairing, with the width that the
          family's function expects
    """

    cos: Tensor
    sin: Tensor
    half: int | None


class Rope:
    """Rotates keys of any layer to any positions.

    sources:  by layer, the rotary module that computes its angles, called with (x, position_ids), and the layer type to
              pass to the module if it takes a layer type (Gemma 3); None: the layer does not rotate
    apply:    the family's apply_rotary_pos_emb(q, k, cos, sin)
    key_dims: width of a key by layer
    longest:  number of positions beyond which some modules change all of their angles (LongRoPE): a module is called
              with more positions only if a caller needs an angle beyond it
    """

    def __init__(
        self, sources: Sequence[Source | None], apply: Apply, key_dims: Sequence[int], longest: int = 1 << 62
    ) -> None:
        self.sources = tuple(sources)
        self.apply = apply
        self.key_dims = tuple(key_dims)
        self.longest = longest
        self._tables: dict[tuple[Source, int], Angles] = {}
        self._lock = threading.Lock()

    @property
    def modules(self) -> set[nn.Module]:
        """Return the rotary modules."""
        return {source[0] for source in self.sources if source is not None}

    @property
    def device(self) -> torch.device:
        return next(buffer.device for module in self.modules for buffer in module.buffers())

    def angles(self, layer: int, positions: Tensor | int, count: int = 0) -> Angles | None:
        """Return a layer's angles at the positions; None for a layer that does not rotate.

        positions: int64 [num_tokens] or [num_kv_heads, num_tokens]; or an int, the first of `count` consecutive
                   positions
        """
        source = self.sources[layer]
        if source is None:
            return None
        where: Tensor | slice
        if isinstance(positions, int):
            where, end = slice(positions, positions + count), positions + count
        else:
            where, end = positions, int(positions.max()) + 1 if positions.numel() else 1
        table = self._table((source, self.key_dims[layer]), end)
        return Angles(table.cos[where], table.sin[where], table.half)

    def rotate(self, keys: Tensor, layer: int, positions: Tensor | int, out: Tensor | None = None) -> Tensor:
        """Rotate keys to positions: any (int64 [num_tokens]), or consecutive positions that start at an int.

        keys: [..., num_kv_heads, num_tokens, head_dim], before RoPE, any float dtype
        out:  same shape, written in place; None: a new tensor of the keys' dtype
        """
        out = torch.empty_like(keys) if out is None else out
        return self.turn(keys, self.angles(layer, positions, keys.shape[-2]), out)

    def unrotate(self, keys: Tensor, layer: int, positions: Tensor | int, out: Tensor) -> Tensor:
        """Undo `rotate`: write to `out` the keys before RoPE, for keys that are rotated to these positions."""
        angles = self.angles(layer, positions, keys.shape[-2])
        if angles is not None:  # (cos, sin) is the scale s times a rotation; (cos, -sin) / s^2 undoes both
            square = angles.cos.square() + angles.sin.square()
            angles = Angles(angles.cos / square, -angles.sin / square, angles.half)
        return self.turn(keys, angles, out)

    def turn(self, keys: Tensor, angles: Angles | None, out: Tensor) -> Tensor:
        """Rotate keys by given angles (None: a layer that does not rotate) into `out`, in float32."""
        if angles is None:
            return out.copy_(keys)
        if angles.half is None:
            return out.copy_(self._apply(keys.float(), angles))
        if keys.dtype == torch.float32 == out.dtype:
            return _rotate_halves(keys, angles.cos, angles.sin, out)
        exact = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
        return out.copy_(_rotate_halves(keys.float(), angles.cos, angles.sin, exact))

    def _apply(self, keys: Tensor, angles: Angles) -> Tensor:
        cos, sin = angles.cos, angles.sin
        if cos.dim() == 3:  # the family's function allows different positions by row of a batch: heads become rows
            keys4 = keys.reshape(-1, 1, *keys.shape[-2:])
            repeats = keys4.shape[0] // cos.shape[0]
            cos, sin = cos.repeat(repeats, 1, 1), sin.repeat(repeats, 1, 1)
        else:
            keys4, cos, sin = keys.reshape(-1, *keys.shape[-3:]), cos[None], sin[None]
        rotated = self.apply(keys4[:, :0], keys4, cos, sin)[1]
        return rotated.reshape(keys.shape)

    def _table(self, kind: tuple[Source, int], end: int) -> Angles:
        """Return the angles of positions 0 to at least end - 1, cached by source."""
        with self._lock:
            table = self._tables.get(kind)
            if table is None or table.cos.shape[0] < end:
                table = self._compute(kind, max(end, min(-(-end // _TABLE_STEP) * _TABLE_STEP, self.longest)))
                self._tables[kind] = table
        return table

    @torch.no_grad()
    def _compute(self, kind: tuple[Source, int], end: int) -> Angles:
        source, key_dim = kind
        device = self.device
        positions = torch.arange(end, device=device)[None]
        x = torch.zeros(1, dtype=torch.float32, device=device)
        cos, sin = (part[0] for part in as_angles(ask(source, x, positions)))
        half = _pairs_halves(self.apply, key_dim, cos.shape[-1], device)
        if half is not None:
            cos, sin = cos[:, :half].contiguous(), sin[:, :half].contiguous()
        return Angles(cos, sin, half)


@dataclass(eq=False)
class AnglesAt:
    """Angles at the same positions in every layer, computed once for all layers of the same kind.

    positions, count: as for `Rope.angles`
    """

    rope: Rope
    positions: Tensor | int
    count: int = 0
    _known: dict[tuple[Source | None, int], Angles | None] = field(default_factory=dict)

    def of(self, layer: int) -> Angles | None:
        """Return a layer's angles; None for a layer that does not rotate."""
        kind = self.rope.sources[layer], self.rope.key_dims[layer]  # layers of one kind have the same angles
        if kind not in self._known:
            self._known[kind] = self.rope.angles(layer, self.positions, self.count)
        return self._known[kind]


def takes_layer_type(rotary: nn.Module) -> bool:
    """Return whether the rotary module computes different angles for different layer types (Gemma 3)."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


def ask(source: Source, like: Tensor, positions: Tensor) -> Any:
    """Return a rotary module's output at positions [batch, num_tokens], in the dtype and on the device of `like`."""
    module, layer_type = source
    return module(like, positions) if layer_type is None else module(like, positions, layer_type)


def as_angles(angles: Any) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a rotary module's output, which may be complex numbers (Llama 4, DeepSeek V2)."""
    return (angles.real, angles.imag) if isinstance(angles, Tensor) else angles


def turn_pairs(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate dimensions 2 d and 2 d + 1 by angles given as complex numbers. cos: [batch, num_tokens, width / 2]"""

    def turn(x: Tensor) -> Tensor:
        first, second = x.float()[..., ::2], x.float()[..., 1::2]
        pairs = first * cos[:, None] - second * sin[:, None], first * sin[:, None] + second * cos[:, None]
        return torch.stack(pairs, -1).flatten(-2).type_as(x)

    return turn(query), turn(key)


def _rotate_halves(keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Compute out = R(position) keys for pairs (d, d + half). Dimensions beyond 2 * half are copied (partial rotary).

    Four passes write straight into `out`, without a temporary of the keys' size (cos, sin: [num_tokens, half]).
    """
    half = cos.shape[-1]
    first, second = keys[..., :half], keys[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if keys.shape[-1] > 2 * half:
        out[..., 2 * half :].copy_(keys[..., 2 * half :])
    return out


def _pairs_halves(apply: Apply, head_dim: int, rotary_dim: int, device: torch.device) -> int | None:
    """Return half the rotary width if the family's function equals `_rotate_halves` on random input, else None."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 3, head_dim, generator=generator).to(device)
    angles = torch.rand(3, rotary_dim // 2, generator=generator).to(device)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    if rotary_dim % 2 or cos.shape[-1] != rotary_dim or rotary_dim > head_dim:
        return None
    half = rotary_dim // 2
    theirs = apply(keys[:, :0], keys, cos[None], sin[None])[1]
    ours = _rotate_halves(keys, cos[:, :half], sin[:, :half], torch.empty_like(keys))
    return half if torch.allclose(ours, theirs, atol=1e-6) else None
