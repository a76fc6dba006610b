"""Tokens that matter in one precision, all others in a lower one.

A stored block has seen no query, so importance is read off its keys: a key that points where few others of its head do
is the one that some query can tell from the rest, and such keys get the high attention scores (KeyDiff, 2504.15364).
The first tokens of a passage, which were attention sinks where it was encoded, are always among the important ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ragcache.codecs.kivi import Int8Codec, KiviCodec
from ragcache.codecs.layered import PARTS, BlockSpec, LayerCodec, Part, PartShape, expect
from ragcache.errors import DamagedBlockError
from ragcache.kv.sparse_block import pack_mask, unpack_mask
from ragcache.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


SINKS = 4
GRADES = ("high", "low")


class Int2(KiviCodec):
    """KIVI's other width, for tokens that are looked at little: not a codec of its own, as its error is large."""

    name: ClassVar[str] = "int2"
    version: ClassVar[int] = 1
    bits: ClassVar[int] = 2
    largest: ClassVar[dict[Part, int]] = {"keys": 32, "values": 32}


class GradedCodec(LayerCodec):
    """A share of each head's tokens in a high precision, the others in a low one.

    precisions: the codecs of both, by grade
    one_in:     one token in so many is important: a share of keys and of values

    Tensors, for keys and for values: `important`, uint8 [num_layers, num_kv_heads, ceil(num_tokens / 8)], a bit a
    token, the lowest first; `high.codes`, `high.scales`, `high.zeros` and `low. ...`, as KiviCodec has them, of the
    important tokens of each head and of the others, in their order.

    Bound: half a group's scale, and the rounding of the result to the block's dtype.
    """

    precisions: ClassVar[Mapping[str, KiviCodec]]
    rounds_states: ClassVar[bool] = True
    one_in: ClassVar[Mapping[Part, int]]
    part_names: ClassVar[frozenset[str]] = frozenset(
        {"important", *(f"{grade}.{name}" for grade in GRADES for name in KiviCodec.part_names)}
    )

    def encode_parts(self, numbers: Mapping[Part, Tensor]) -> dict[Part, dict[str, Tensor]]:
        return {part: self.encode_graded(part, numbers[part], numbers["keys"]) for part in PARTS}

    def encode_part(self, part: Part, numbers: Tensor) -> dict[str, Tensor]:
        """Encode by the importance of these numbers alone."""
        return self.encode_graded(part, numbers, numbers)

    def encode_graded(self, part: Part, numbers: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """Encode by the importance of the tokens' keys."""
        mask = important(keys, num_important(keys.shape[2], self.one_in[part]))
        found = {"important": pack_mask(mask)}
        for grade, chosen in (("high", mask), ("low", ~mask)):
            own = numbers[chosen].view(*numbers.shape[:2], int(chosen[0, 0].sum()), numbers.shape[3])
            encoded = self.precisions[grade].encode_part(part, own)
            found |= {f"{grade}.{name}": tensor for name, tensor in encoded.items()}
        return found

    def check_part(self, part: Part, tensors: Mapping[str, Tensor], spec: BlockSpec) -> None:
        layers, heads, tokens, _ = spec.shape(part)
        high = num_important(tokens, self.one_in[part])
        packed = expect(tensors, "important", (layers, heads, -(-tokens // 8)), torch.uint8)
        bits = unpack_mask(packed, 8 * packed.shape[2])
        if bool((bits[:, :, :tokens].sum(2) != high).any() or bits[:, :, tokens:].any()):
            raise DamagedBlockError(f"a head of a block of codec {self.name!r} does not have {high} important tokens")
        for grade, num_tokens in (("high", high), ("low", tokens - high)):
            own = spec._replace(num_tokens=num_tokens)
            self.precisions[grade].check_part(part, _of(grade, tensors), own)

    def decode_part(self, part: Part, tensors: Mapping[str, Tensor], layer: int, out: Tensor) -> None:
        heads, tokens, width = out.shape
        mask = unpack_mask(tensors["important"][layer].to(out.device, non_blocking=True), tokens)
        high = num_important(tokens, self.one_in[part])
        for grade, num_tokens, chosen in (("high", high, mask), ("low", tokens - high, ~mask)):
            own = torch.empty(heads, num_tokens, width, dtype=torch.float32, device=out.device)
            self.precisions[grade].decode_part(part, _of(grade, tensors), layer, own)
            out[chosen] = own.flatten(0, 1)

    def part_bound(self, part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        return max(codec.part_bound(part, _of(grade, tensors), dtype) for grade, codec in self.precisions.items())

    def expected_part_bytes(self, part: Part, shape: PartShape) -> float:
        mask = shape.num_layers * shape.num_kv_heads * -(-shape.num_tokens // 8)
        high = num_important(shape.num_tokens, self.one_in[part])
        tokens = {"high": high, "low": shape.num_tokens - high}
        return mask + sum(
            codec.expected_part_bytes(part, shape._replace(num_tokens=tokens[grade]))
            for grade, codec in self.precisions.items()
        )


def num_important(num_tokens: int, one_in: int) -> int:
    """Number of important tokens in a block of `num_tokens`."""
    return min(num_tokens, max(SINKS, -(-num_tokens // one_in)))


def important(keys: Tensor, count: int) -> Tensor:
    """Which tokens of each layer and head are kept precisely: bool [num_layers, num_kv_heads, num_tokens].

    KeyDiff: those whose keys are least like the mean direction of their head's keys, by cosine similarity; the first
    SINKS in any case. keys: [num_layers, num_kv_heads, num_tokens, head_dim], before RoPE, which would add the
    positions' differences to the passage's own. count: of each head
    """
    directions = torch.nn.functional.normalize(keys.double(), dim=3, eps=1e-30)
    anchor = torch.nn.functional.normalize(directions.mean(2, keepdim=True), dim=3, eps=1e-30)
    # Rounded: no order of adding shows in the ranks. Stable: of equal ones the first.
    likeness = (directions * anchor).sum(3).float()
    likeness[:, :, :SINKS] = -2.0
    first = likeness.argsort(dim=2, stable=True)[:, :, :count]
    return torch.zeros(keys.shape[:3], dtype=torch.bool).scatter_(2, first, True)


def _of(grade: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{grade}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


# More bits for the tokens that matter, few for all others, none thrown away: MiKV (2402.18096).
# Eviction loses what a later question may ask for; MiKV keeps the tokens that it would have evicted in low precision,
# and the important ones in high precision. Two things differ here, since a stored block has seen no query:
# - Importance. MiKV accumulates attention scores while it generates. Here it is read off the keys; see `graded.py`.
# - Outliers. MiKV scales channels by sqrt(max |Q| / max |K|) before it quantises keys by token, so that channels with
#   large keys do not use up the range of the others. There is no Q here, and none is needed: keys are quantised by
#   channel, as KIVI does it, where a channel has a range of its own.


class MikvCodec(GradedCodec):
    """A fifth of each head's tokens in 8 bits, the others in 2: `int8` over the former, KIVI with 2 bits in groups of
    32 over the latter. Tensors and bound: see GradedCodec."""

    name: ClassVar[str] = "mikv"
    version: ClassVar[int] = 1
    precisions: ClassVar[Mapping[str, KiviCodec]] = {"high": Int8Codec(), "low": Int2()}
    one_in: ClassVar[Mapping[Part, int]] = {"keys": 5, "values": 5}
