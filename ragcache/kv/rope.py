"""Rotary positions, taken from the model's own rotary module.

Keys are kept before RoPE and rotated when they are placed. cos and sin come from the model, `attention_scaling`
(YaRN) included, so a key is scaled once and never un-rotated. Rotation runs in float32.

RoPE: Su et al., "RoFormer" (arXiv 2104.09864), eq. 15; the pairing (halves, interleaved, partial) is the family's own
`apply_rotary_pos_emb`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_TABLE_STEP = 1024


class Rope:
    """Rotates keys of any layer to any positions.

    rotary:      the model's rotary module; called with (x, position_ids) or (x, position_ids, layer_type)
    apply:       the family's apply_rotary_pos_emb(q, k, cos, sin)
    layer_types: one string a layer where the module wants it (Gemma 3), else None
    rotated:     whether layer i rotates at all (SmolLM3 has layers that do not)
    """

    def __init__(
        self, rotary: nn.Module, apply: Apply, layer_types: Sequence[str] | None, rotated: Sequence[bool]
    ) -> None:
        self.rotary = rotary
        self.apply = apply
        self.rotated = tuple(rotated)
        by_type = takes_layer_type(rotary) and layer_types is not None
        self._types: tuple[str | None, ...] = tuple(layer_types or ()) if by_type else (None,) * len(self.rotated)
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._lock = threading.Lock()
        self._halves: int | None = None
        self._halves_known = False

    def layer_type(self, layer: int) -> str | None:
        """The type under which the rotary module knows this layer; None where all layers share one table."""
        return self._types[layer]

    def tables(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin for positions 0..end-1: float32 [end, rotary_dim], scaling included."""
        kind = self._types[layer]
        with self._lock:
            table = self._tables.get(kind)
            if table is None or table[0].shape[0] < end:
                table = self._compute(kind, -(-end // _TABLE_STEP) * _TABLE_STEP)
                self._tables[kind] = table
        return table[0][:end], table[1][:end]

    def angles(self, layer: int, positions: Tensor | int, count: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [num_tokens, rotary_dim], at int64 positions or at `count` places from an int on."""
        if isinstance(positions, int):
            cos, sin = self.tables(layer, positions + count)
            return cos[positions:], sin[positions:]
        cos, sin = self.tables(layer, int(positions.max()) + 1 if positions.numel() else 1)
        return cos[positions], sin[positions]

    def rotate(self, keys: Tensor, layer: int, positions: Tensor | int, out: Tensor | None = None) -> Tensor:
        """Rotate keys to positions: any (int64 [num_tokens]), or consecutive ones from an int on.

        keys: [..., num_kv_heads, num_tokens, head_dim], before RoPE, any float dtype
        out:  same shape, written in place; a new tensor of the keys' dtype when absent
        """
        out = torch.empty_like(keys) if out is None else out
        angles = self.angles(layer, positions, keys.shape[-2]) if self.rotated[layer] else None
        return self.turn(keys, angles, out)

    def turn(self, keys: Tensor, angles: tuple[Tensor, Tensor] | None, out: Tensor) -> Tensor:
        """Rotate keys by ready angles (None: a layer that does not rotate) into `out`, in float32."""
        if angles is None:
            return out.copy_(keys)
        cos, sin = angles
        half = self._half_width(keys, cos)
        if half is None:
            return out.copy_(self._apply(keys.float(), cos, sin))
        if keys.dtype == torch.float32 == out.dtype:
            return _rotate_halves(keys, cos[:, :half], sin[:, :half], out)
        return out.copy_(
            _rotate_halves(keys.float(), cos[:, :half], sin[:, :half], torch.empty_like(keys, dtype=torch.float32))
        )

    def _apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        keys4 = keys.reshape(-1, *keys.shape[-3:])
        rotated = self.apply(keys4[:, :0], keys4, cos[None], sin[None])[1]
        return rotated.reshape(keys.shape)

    def _half_width(self, keys: Tensor, cos: Tensor) -> int | None:
        """Half the rotary width where the family pairs dimension d with d + half; None for any other pairing."""
        if not self._halves_known:
            self._halves = _pairs_halves(self.apply, keys.shape[-1], cos.shape[-1], keys.device)
            self._halves_known = True
        return self._halves

    def _compute(self, kind: str | None, end: int) -> tuple[Tensor, Tensor]:
        device = next(self.rotary.buffers()).device
        positions = torch.arange(end, device=device)[None]
        x = torch.zeros(1, dtype=torch.float32, device=device)
        args: tuple[Any, ...] = (x, positions) if kind is None else (x, positions, kind)
        cos, sin = self.rotary(*args)
        return cos[0], sin[0]


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
