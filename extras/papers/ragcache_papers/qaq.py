"""Keys and values with precisions of their own, by what attention makes of their errors: QAQ (2403.04643).

QAQ's points, and what becomes of them in a stored block, which has seen no query:

- A key's error goes through the softmax, a value's is only averaged: keys are more sensitive, and get more bits. QAQ
  gives each token as many as a bound on the error of attention asks for. Here tokens have 4 bits or 2: half of a head's
  keys have 4, and a fifth of its values.
- Tokens with much attention get more bits. QAQ predicts it from the largest attention of the last queries; here it is
  read off the keys (see `graded.py`).
- The largest and smallest numbers, one in a hundred, are kept exact, so that the others have the range for themselves.
  QAQ takes them from all numbers of the cache; here they are those farthest from the mean of their channel (keys) or
  token (values) in units of its deviation, equally many in every head of every layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ragcache.codecs.kivi import Int4Codec, KiviCodec
from ragcache.codecs.layered import BlockSpec, Part, PartShape, expect
from ragcache.errors import DamagedBlockError
from ragcache.lazy_torch import torch
from ragcache_papers.mixed_bits import GradedCodec, Int2

if TYPE_CHECKING:
    from torch import Tensor

OUTLIER_SHARE = 0.01
_ALONG = {"keys": 2, "values": 3}  # the dimension over which a number is compared with others


class _Wide4(Int4Codec):
    """Without their outliers numbers need no small groups."""

    largest: ClassVar[dict[Part, int]] = {"keys": 128, "values": 128}


class _Wide2(Int2):
    largest: ClassVar[dict[Part, int]] = {"keys": 128, "values": 128}


class QaqCodec(GradedCodec):
    """4 bits for half of each head's keys and a fifth of its values, 2 for the others, in groups of up to 128; one
    number in a hundred is exact.

    Tensors, for keys and for values: those of GradedCodec; `outliers`, int16 [num_layers, num_kv_heads, count]
    (int32 where a head has more than 32,768 numbers), places in [num_tokens * dim] in ascending order; `exact`, of the
    same shape, the numbers there in the block's dtype.

    Bound: half a group's scale, and the rounding of the result to the block's dtype.
    """

    name: ClassVar[str] = "qaq"
    version: ClassVar[int] = 1
    precisions: ClassVar[Mapping[str, KiviCodec]] = {"high": _Wide4(), "low": _Wide2()}
    one_in: ClassVar[Mapping[Part, int]] = {"keys": 2, "values": 5}
    part_names: ClassVar[frozenset[str]] = GradedCodec.part_names | {"outliers", "exact"}

    def encode_graded(self, part: Part, numbers: Tensor, keys: Tensor) -> dict[str, Tensor]:
        places = _outliers(part, numbers)
        exact = numbers.flatten(2).gather(2, places)
        others = _within_others(part, numbers, places)
        held = places.to(_index_dtype(*numbers.shape[2:]))
        return {**super().encode_graded(part, others, keys), "outliers": held, "exact": exact}

    def check_part(self, part: Part, tensors: Mapping[str, Tensor], spec: BlockSpec) -> None:
        super().check_part(part, tensors, spec)
        layers, heads, tokens, width = spec.shape(part)
        shape = (layers, heads, _num_outliers(tokens, width))
        places = expect(tensors, "outliers", shape, _index_dtype(tokens, width)).long()
        expect(tensors, "exact", shape, spec.dtype)
        wrong = (places < 0) | (places >= tokens * width)
        if bool(wrong.any()) or bool((places.diff(dim=2) <= 0).any()):
            raise DamagedBlockError("the exact numbers of a block do not stand at ascending places in it")

    def decode_part(self, part: Part, tensors: Mapping[str, Tensor], layer: int, out: Tensor) -> None:
        super().decode_part(part, tensors, layer, out)
        places = tensors["outliers"][layer].to(out.device, non_blocking=True).long()
        heads = torch.arange(out.shape[0], device=out.device)[:, None]
        width = max(1, out.shape[2])
        out[heads, places // width, places % width] = tensors["exact"][layer].to(out.device).float()

    def expected_part_bytes(self, part: Part, shape: PartShape) -> float:
        tokens, width = shape.num_tokens, shape.dim
        count = shape.num_layers * shape.num_kv_heads * _num_outliers(tokens, width)
        index = 2 if _is_narrow(tokens, width) else 4
        return super().expected_part_bytes(part, shape) + count * (index + shape.itemsize)


def _num_outliers(num_tokens: int, width: int) -> int:
    """Exact numbers in each head of a layer."""
    return math.ceil(OUTLIER_SHARE * num_tokens * width)


def _index_dtype(num_tokens: int, width: int) -> torch.dtype:
    return torch.int16 if _is_narrow(num_tokens, width) else torch.int32


def _is_narrow(num_tokens: int, width: int) -> bool:
    return num_tokens * width <= 1 << 15


def _outliers(part: Part, numbers: Tensor) -> Tensor:
    """Places of the numbers farthest from their mean, int64 [num_layers, num_kv_heads, count], ascending."""
    wide = numbers.double()
    off = wide - wide.mean(_ALONG[part], keepdim=True)
    deviation = off.square().mean(_ALONG[part], keepdim=True).sqrt()
    # Rounded: no order of adding shows in the ranks.
    distance = (off.abs() / deviation.clamp(min=1e-300)).float().flatten(2)
    count = _num_outliers(*numbers.shape[2:])
    if not count:
        return torch.empty(*numbers.shape[:2], 0, dtype=torch.int64)
    least = distance.topk(count, dim=2).values[:, :, -1:]
    taken, equal = distance > least, distance == least
    taken |= equal & (equal.cumsum(2) <= count - taken.sum(2, keepdim=True))  # of equal ones the first
    return taken.nonzero()[:, 2].view(*numbers.shape[:2], count)


def _within_others(part: Part, numbers: Tensor, places: Tensor) -> Tensor:
    """The numbers, with outliers moved to the nearest that their channel or token has without them."""
    taken = torch.zeros(numbers.flatten(2).shape, dtype=torch.bool).scatter_(2, places, True).view(numbers.shape)
    if not numbers.numel():
        return numbers
    low = numbers.masked_fill(taken, torch.inf).amin(_ALONG[part], keepdim=True)
    high = numbers.masked_fill(taken, -torch.inf).amax(_ALONG[part], keepdim=True)
    empty = low > high  # all of them are outliers
    return numbers.clamp(low.masked_fill(empty, 0), high.masked_fill(empty, 0))
