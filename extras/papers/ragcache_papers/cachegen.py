"""Quantisation and entropy coding, in the spirit of CacheGen (2310.07240, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ragcache.codecs.affine import parameter_dtype, rounded_up
from ragcache.codecs.layered import BlockSpec, LayerCodec, Part, PartShape, expect, unit_roundoff
from ragcache.lazy_torch import torch
from ragcache_papers.frames import check_frames, expected_frame_bytes, pack_frames, read_frame

if TYPE_CHECKING:
    from torch import Tensor

GROUP_TOKENS = 10
# Shares of a channel's standard deviation: in the first, second and last third of the layers. Later layers bear more.
STEPS = (0.3, 0.45, 0.65)
_NORMAL = math.sqrt(2 * math.pi * math.e)  # its log2 is the entropy of a unit deviation
_LEVELS = 127  # codes are -127 to 127


class CacheGenCodec(LayerCodec):
    """CacheGen's three steps, each changed so that errors do not add up.

    1. Every channel of a layer is quantised with a step that is a share of its standard deviation, coarser in
       later layers. The step grows if 255 codes would not reach the channel's largest number.
    2. Tokens form groups of 10. If a channel's codes then become smaller, the codes after the first of a group become
       differences from it. CacheGen quantises differences; here codes are subtracted, modulo 256, so that errors do not
       add up and half a step bounds every number.
    3. Each layer is entropy-coded, by zstandard: its Huffman coder loses little against an arithmetic coder at three
       bits a number, and is many times faster to decode.

    Of all distributions with the same deviation the normal distribution has the largest entropy,
    log2(sqrt(2 pi e) / step): 3.3 bits per number on average, for any model.

    Tensors, for keys and for values: `stream`, uint8, the layers' zstandard frames; `ends`, int64 [num_layers], where
    each ends; `steps` and `means`, [num_layers, num_kv_heads, 1, head_dim], float16 unless the numbers are too large;
    `deltas`, uint8 of the same shape: 1 if a channel is coded in differences.

    Bound: half a channel's step, and the rounding of the result to the block's dtype.
    """

    name: ClassVar[str] = "cachegen"
    version: ClassVar[int] = 1
    rounds_states: ClassVar[bool] = True
    part_names: ClassVar[frozenset[str]] = frozenset({"stream", "ends", "steps", "means", "deltas"})

    def encode_part(self, part: Part, numbers: Tensor) -> dict[str, Tensor]:
        dtype = parameter_dtype(numbers)
        frames, parameters = [], []
        for layer, one in enumerate(numbers):
            codes, *own = _quantise(one.float(), _step(layer, len(numbers)), dtype)
            frames.append(codes.numpy().tobytes())
            parameters.append(own)
        steps, means, deltas = (torch.stack(tensors) for tensors in zip(*parameters, strict=True))
        return {**pack_frames(frames), "steps": steps, "means": means, "deltas": deltas}

    def check_part(self, part: Part, tensors: Mapping[str, Tensor], spec: BlockSpec) -> None:
        layers, heads, tokens, width = spec.shape(part)
        expect(tensors, "stream", (tensors["stream"].numel(),), torch.uint8)
        expect(tensors, "ends", (layers,), torch.int64)
        for name in ("steps", "means"):
            expect(tensors, name, (layers, heads, 1, width), torch.float16, torch.float32)
        expect(tensors, "deltas", (layers, heads, 1, width), torch.uint8)
        check_frames(tensors, [heads * tokens * width] * layers)

    def decode_part(self, part: Part, tensors: Mapping[str, Tensor], layer: int, out: Tensor) -> None:
        steps, means, deltas = (tensors[name][layer] for name in ("steps", "means", "deltas"))
        codes = read_frame(tensors, layer, out.numel()).view(out.shape)
        if bool(deltas.any()):
            _undo_differences(codes, deltas.cpu())
        out.copy_(codes.view(torch.int8).to(out.device, non_blocking=True))
        out.mul_(steps.to(out.device).float())
        out.add_(means.to(out.device).float())

    def part_bound(self, part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        steps, means = tensors["steps"].double(), tensors["means"].double()
        highest = means.abs() + steps * _LEVELS
        return float((steps * (0.5 + 2.0**-12) + highest * unit_roundoff(dtype)).max())

    def expected_part_bytes(self, part: Part, shape: PartShape) -> float:
        of_layer = shape._replace(num_layers=1)
        bits = [math.log2(_NORMAL / _step(layer, shape.num_layers)) for layer in range(shape.num_layers)]
        frames = sum(expected_frame_bytes(of_layer.numbers * width / 8) + 8 for width in bits)
        return frames + 5 * shape._replace(num_tokens=1).numbers  # steps and means in float16, deltas


def _step(layer: int, num_layers: int) -> float:
    return STEPS[3 * layer // num_layers]


def _quantise(numbers: Tensor, share: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes (uint8, differences taken), steps, means and deltas of a layer, [num_kv_heads, num_tokens, dim]."""
    if not numbers.numel():
        empty = torch.zeros(numbers.shape[0], 1, numbers.shape[2])
        return numbers.to(torch.uint8), empty.to(dtype), empty.to(dtype), empty.to(torch.uint8)
    means = numbers.double().mean(1, keepdim=True).to(dtype)  # float64: no order of adding shows in the result
    centred = numbers - means.float()
    deviation = centred.double().pow(2).mean(1, keepdim=True).sqrt()
    highest = centred.abs().amax(1, keepdim=True).double()
    steps = rounded_up(torch.maximum(share * deviation, highest / _LEVELS), dtype)
    codes = (centred / torch.where(steps > 0, steps.float(), 1)).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int16)
    differences = _differences(codes)
    deltas = differences.abs().sum(1, keepdim=True) < codes.abs().sum(1, keepdim=True)
    chosen = torch.where(deltas, differences, codes)
    return chosen.to(torch.uint8), steps, means, deltas.to(torch.uint8)


def _differences(codes: Tensor) -> Tensor:
    """Return the first codes of every group of tokens, and for the others their differences from the first."""
    firsts = codes[:, ::GROUP_TOKENS].repeat_interleave(GROUP_TOKENS, dim=1)[:, : codes.shape[1]]
    differences = codes - firsts
    differences[:, ::GROUP_TOKENS] = codes[:, ::GROUP_TOKENS]
    return differences


def _undo_differences(codes: Tensor, deltas: Tensor) -> None:
    """Add each group's first codes to the others, in place, modulo 256."""
    for start in range(1, GROUP_TOKENS):
        others = codes[:, start::GROUP_TOKENS]
        others += codes[:, ::GROUP_TOKENS][:, : others.shape[1]] * deltas
