"""Rotary positions, taken from the model's own rotary module.

Keys are kept before RoPE and rotated when they are placed. cos and sin come from the model, `attention_scaling`
(YaRN) included, so a key is scaled once. `unrotate` takes the scale out again. Rotation runs in float32.

RoPE: Su et al., "RoFormer" (arXiv 2104.09864), eq. 15; the pairing (halves, interleaved, partial) is the family's own
`apply_rotary_pos_emb`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Kind = tuple[str | None, int]
_TABLE_STEP = 1024


class Angles(NamedTuple):
    """cos and sin, float32 [num_tokens, width], attention scaling included; [num_kv_heads, num_tokens, width] where
    heads hold tokens of different positions.

    half: the family pairs dimension d with d + half, and width is half; None: it pairs otherwise, width is as the
          family's own function wants it
    """

    cos: Tensor
    sin: Tensor
    half: int | None


class Rope:
    """Rotates keys of any layer to any positions.

    rotary:      the model's rotary module; called with (x, position_ids) or (x, position_ids, layer_type)
    apply:       the family's apply_rotary_pos_emb(q, k, cos, sin)
    layer_types: one string a layer where the module wants it (Gemma 3), else None
    rotated:     whether layer i rotates at all (SmolLM3 has layers that do not)
    key_dims:    width of a key by layer
    """

    def __init__(
        self,
        rotary: nn.Module,
        apply: Apply,
        layer_types: Sequence[str] | None,
        rotated: Sequence[bool],
        key_dims: Sequence[int],
    ) -> None:
        self.rotary = rotary
        self.apply = apply
        self.rotated = tuple(rotated)
        by_type = takes_layer_type(rotary) and layer_types is not None
        self._types: tuple[str | None, ...] = tuple(layer_types or ()) if by_type else (None,) * len(self.rotated)
        self._kinds = tuple(zip(self._types, key_dims, strict=True))
        self._tables: dict[Kind, Angles] = {}
        self._lock = threading.Lock()

    def layer_type(self, layer: int) -> str | None:
        """The type under which the rotary module knows this layer; None where all layers share one table."""
        return self._types[layer]

    def kind(self, layer: int) -> Kind:
        """Layers of one kind have the same angles, where they rotate."""
        return self._kinds[layer]

    def angles(self, layer: int, positions: Tensor | int, count: int = 0) -> Angles | None:
        """Angles at int64 positions, [num_tokens] or [num_kv_heads, num_tokens], or at `count` places from an int on;
        None for a layer that does not rotate."""
        if not self.rotated[layer]:
            return None
        if isinstance(positions, int):
            table = self._table(layer, positions + count)
            return Angles(
                table.cos[positions : positions + count], table.sin[positions : positions + count], table.half
            )
        table = self._table(layer, int(positions.max()) + 1 if positions.numel() else 1)
        return Angles(table.cos[positions], table.sin[positions], table.half)

    def rotate(self, keys: Tensor, layer: int, positions: Tensor | int, out: Tensor | None = None) -> Tensor:
        """Rotate keys to positions: any (int64 [num_tokens]), or consecutive ones from an int on.

        keys: [..., num_kv_heads, num_tokens, head_dim], before RoPE, any float dtype
        out:  same shape, written in place; a new tensor of the keys' dtype when absent
        """
        out = torch.empty_like(keys) if out is None else out
        return self.turn(keys, self.angles(layer, positions, keys.shape[-2]), out)

    def unrotate(self, keys: Tensor, layer: int, positions: Tensor | int, out: Tensor) -> Tensor:
        """The inverse of `rotate`, into `out`: keys before RoPE, of keys that stand at these positions."""
        angles = self.angles(layer, positions, keys.shape[-2])
        if angles is not None:  # (cos, sin) is the scale s times a rotation; (cos, -sin) / s^2 undoes both
            square = angles.cos.square() + angles.sin.square()
            angles = Angles(angles.cos / square, -angles.sin / square, angles.half)
        return self.turn(keys, angles, out)

    def turn(self, keys: Tensor, angles: Angles | None, out: Tensor) -> Tensor:
        """Rotate keys by ready angles (None: a layer that does not rotate) into `out`, in float32."""
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
        if cos.dim() == 3:  # the family's function knows rows of a batch at positions of their own: heads become rows
            keys4 = keys.reshape(-1, 1, *keys.shape[-2:])
            repeats = keys4.shape[0] // cos.shape[0]
            cos, sin = cos.repeat(repeats, 1, 1), sin.repeat(repeats, 1, 1)
        else:
            keys4, cos, sin = keys.reshape(-1, *keys.shape[-3:]), cos[None], sin[None]
        rotated = self.apply(keys4[:, :0], keys4, cos, sin)[1]
        return rotated.reshape(keys.shape)

    def _table(self, layer: int, end: int) -> Angles:
        """Angles of positions 0 to at least end - 1, kept by layer type."""
        kind = self._kinds[layer]
        with self._lock:
            table = self._tables.get(kind)
            if table is None or table.cos.shape[0] < end:
                table = self._compute(kind, -(-end // _TABLE_STEP) * _TABLE_STEP)
                self._tables[kind] = table
        return table

    @torch.no_grad()
    def _compute(self, kind: Kind, end: int) -> Angles:
        layer_type, key_dim = kind
        device = next(self.rotary.buffers()).device
        positions = torch.arange(end, device=device)[None]
        x = torch.zeros(1, dtype=torch.float32, device=device)
        args: tuple[Any, ...] = (x, positions) if layer_type is None else (x, positions, layer_type)
        cos, sin = (part[0] for part in self.rotary(*args))
        half = _pairs_halves(self.apply, key_dim, cos.shape[-1], device)
        if half is not None:
            cos, sin = cos[:, :half].contiguous(), sin[:, :half].contiguous()
        return Angles(cos, sin, half)


class AnglesAt:
    """Angles at the same positions in every layer, looked up once for layers of one kind.

    positions, count: as for `Rope.angles`
    """

    def __init__(self, rope: Rope, positions: Tensor | int, count: int = 0) -> None:
        self._rope = rope
        self._positions = positions
        self._count = count
        self._known: dict[Kind, Angles | None] = {}

    def of(self, layer: int) -> Angles | None:
        """None for a layer that does not rotate."""
        if not self._rope.rotated[layer]:
            return None
        kind = self._rope.kind(layer)
        if kind not in self._known:
            self._known[kind] = self._rope.angles(layer, self._positions, self._count)
        return self._known[kind]


def takes_layer_type(rotary: nn.Module) -> bool:
    """Whether the rotary module computes different angles for different layer types (Gemma 3)."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


def _rotate_halves(keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """out = R(position) keys for pairs (d, d + half); dimensions beyond 2 * half pass unchanged (partial rotary).

    Four passes that write straight into `out`: no temporary of the keys' size (cos, sin: [num_tokens, half]).
    """
    half = cos.shape[-1]
    first, second = keys[..., :half], keys[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if keys.shape[-1] > 2 * half:
        out[..., 2 * half :].copy_(keys[..., 2 * half :])
    return out


def _pairs_halves(apply: Apply, head_dim: int, rotary_dim: int, device: torch.device) -> int | None:
    """Ask the family's function, on random input, whether `_rotate_halves` is what it computes."""
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
