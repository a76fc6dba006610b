"""Codecs that decode a layer at a time, and the blocks that they return.

Such a block stays encoded wherever it is held, and a layer's keys or values are decoded straight into the tensor that
attention reads. Only encoded bytes are read from a disk, held in memory or sent to another device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

from ragcache.codecs.base import Codec
from ragcache.errors import DamagedBlockError, UnencodableBlockError
from ragcache.kv.block import KVBlock, Stored
from ragcache.kv.block import Part as Part
from ragcache.kv.cache_shape import LayerShape
from ragcache.lazy_torch import Tensor, torch

PARTS: tuple[Part, Part] = ("keys", "values")
FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16")
# The largest number that is encoded: the difference of two such numbers is finite in float32.
LARGEST = 2.0**126
_LARGEST_HALF = 65504.0
_SPEC_BYTES = 5 * 8  # bytes of `BlockSpec.to_tensors`


class BlockSpec(NamedTuple):
    """Shape and dtype of the encoded block; in a file, the tensors `shape` (int64 [5]) and `like` (empty)."""

    num_layers: int
    num_kv_heads: int
    num_tokens: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, block: KVBlock) -> BlockSpec:
        return cls._make((*block.key_shape, block.value_shape[3], block.dtype))

    def shape(self, part: Part) -> tuple[int, int, int, int]:
        width = self.key_dim if part == "keys" else self.value_dim
        return self.num_layers, self.num_kv_heads, self.num_tokens, width

    def to_tensors(self) -> dict[str, Tensor]:
        *sizes, dtype = self
        return {"shape": torch.tensor(sizes, dtype=torch.int64), "like": torch.empty(0, dtype=dtype)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> BlockSpec:
        """Return the spec that a file's tensors hold. Raises DamagedBlockError."""
        sizes, like = tensors.get("shape"), tensors.get("like")
        if sizes is None or sizes.shape != (5,) or sizes.dtype != torch.int64 or bool((sizes < 0).any()):
            raise DamagedBlockError("an encoded block's shape is five numbers")
        if like is None or like.shape != (0,) or str(like.dtype) not in FLOATS:
            raise DamagedBlockError("an encoded block says which of float32, bfloat16 and float16 it was")
        return cls._make((*sizes.tolist(), like.dtype))


class PartShape(NamedTuple):
    """Shape of a block's keys or values. itemsize: bytes of a number"""

    num_layers: int
    num_kv_heads: int
    num_tokens: int
    dim: int
    itemsize: int

    @property
    def numbers(self) -> int:
        return self.num_layers * self.num_kv_heads * self.num_tokens * self.dim


class LayerCodec(Codec):
    """A codec that encodes keys and values separately, and decodes them layer by layer.

    Subclasses encode and decode a *part*: the keys, or the values, of all layers.

    part_names: names of the tensors that `encode_part` returns

    All arithmetic is in float32, a single IEEE operation a step, so that every process and device decodes the same
    bits.
    """

    part_names: ClassVar[frozenset[str]]

    @abstractmethod
    def encode_part(self, part: Part, numbers: Tensor) -> dict[str, Tensor]:
        """Return the tensors, named by `part_names`, that encode `numbers`.

        numbers: float [num_layers, num_kv_heads, num_tokens, dim], finite, on the CPU
        """

    @abstractmethod
    def check_part(self, part: Part, tensors: Mapping[str, Tensor], spec: BlockSpec) -> None:
        """Raise DamagedBlockError if `encode_part` cannot have returned these tensors for such a block."""

    @abstractmethod
    def decode_part(self, part: Part, tensors: Mapping[str, Tensor], layer: int, out: Tensor) -> None:
        """Decode a layer of the part's tensors into `out`, float32 [num_kv_heads, num_tokens, dim].

        `out` may be on any device and need not be contiguous.
        """

    def stored(self, parts: Mapping[Part, Mapping[str, Tensor]], spec: BlockSpec) -> Stored | None:
        """Return the memory layout of the tensors if a kernel can decode them (`Stored`), else None."""
        return None

    @abstractmethod
    def part_bound(self, part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        """Return the largest absolute error of the decoded numbers, including rounding to `dtype`, the block's own."""

    @abstractmethod
    def expected_part_bytes(self, part: Part, shape: PartShape) -> float:
        """Compute the bytes of `encode_part`'s tensors for such numbers; see `expected_bytes`."""

    def expected_bytes_alike(self, num_layers: int, layer: LayerShape, num_tokens: int, itemsize: int) -> float:
        widths: dict[Part, int] = {"keys": layer.key_dim, "values": layer.value_dim}
        shapes = {part: PartShape(num_layers, layer.num_kv_heads, num_tokens, widths[part], itemsize) for part in PARTS}
        return _SPEC_BYTES + sum(self.expected_part_bytes(part, shape) for part, shape in shapes.items())

    def encode_alike(self, block: KVBlock) -> dict[str, Tensor]:
        """Return the tensors to store; a block that this codec has already encoded returns its own.

        Raises UnencodableBlockError for NaN, infinities, numbers beyond 2^126 and dtypes that are not floats.
        """
        if isinstance(block, EncodedBlock) and type(block.codec) is type(self):
            return dict(block.tensors)
        found = BlockSpec.of(block).to_tensors()
        for part in PARTS:
            tensors = self.encode_part(part, _encodable(part, block))
            found |= {f"{part}.{name}": tensor for name, tensor in tensors.items()}
        return found

    def decode_alike(self, tensors: Mapping[str, Tensor]) -> KVBlock:
        return EncodedBlock(self, tensors)

    def bound_alike(self, block: KVBlock) -> float:
        encoded = EncodedBlock(self, self.encode_alike(block))
        steps = torch.finfo(block.dtype)  # below the smallest normal number, steps are as wide as at that number
        least = steps.smallest_normal * steps.eps / 2
        return least + max(self.part_bound(part, encoded.part(part), block.dtype) for part in PARTS)


class EncodedBlock(KVBlock):
    """A KV block in its codec's tensors, decoded all at once by `keys` and `values`, or by layer (`copy_keys` ...).

    tensors: the codec's tensors by name, as in a file; `num_bytes` counts their bytes

    Raises DamagedBlockError when the tensors are not the codec's.
    """

    def __init__(self, codec: LayerCodec, tensors: Mapping[str, Tensor]) -> None:
        self.codec = codec
        self.tensors = dict(tensors)
        self._spec = BlockSpec.from_tensors(tensors)
        named = [(*name.partition(".")[::2], tensor) for name, tensor in tensors.items()]
        self._parts = {part: {name: tensor for of, name, tensor in named if of == part} for part in PARTS}
        object.__setattr__(self, "recipe", None)  # the block's field is frozen
        if tensors.keys() != {"shape", "like"} | {f"{part}.{name}" for part in PARTS for name in codec.part_names}:
            raise DamagedBlockError(f"a block of codec {codec.name!r} does not hold the tensors {sorted(tensors)}")
        for part in PARTS:
            codec.check_part(part, self._parts[part], self._spec)

    def part(self, part: Part) -> Mapping[str, Tensor]:
        """Return the encoded tensors of keys or values, by the codec's names."""
        return self._parts[part]

    @property
    def stored(self) -> list[tuple[Stored, list[int]]] | None:
        found = self.codec.stored(self._parts, self._spec)
        return None if found is None else [(found, [*range(self.num_layers)])]

    @property
    def keys(self) -> Tensor:
        return self._decoded("keys")

    @property
    def values(self) -> Tensor:
        return self._decoded("values")

    @property
    def key_shape(self) -> torch.Size:
        return torch.Size(self._spec.shape("keys"))

    @property
    def value_shape(self) -> torch.Size:
        return torch.Size(self._spec.shape("values"))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        return EncodedBlock(self.codec, {name: change(tensor) for name, tensor in self.tensors.items()})

    def _copy(self, part: Part, layer: int, out: Tensor) -> None:
        if self.dtype == out.dtype == torch.float32:
            self.codec.decode_part(part, self._parts[part], layer, out)
            return
        exact = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self.codec.decode_part(part, self._parts[part], layer, exact)
        if self.dtype == torch.float16:  # a grid may extend beyond the largest float16, although no number did
            exact.clamp_(-_LARGEST_HALF, _LARGEST_HALF)
        # Rounded to the block's dtype before `out`'s, so that `out` gets the numbers that the decoded block has.
        out.copy_(exact.to(self.dtype))

    def _layer(self, part: Part, layer: int) -> Tensor:
        out = torch.empty(self._spec.shape(part)[1:], dtype=self.dtype)
        self._copy(part, layer, out)
        return out

    def _decoded(self, part: Part) -> Tensor:
        out = torch.empty(self._spec.shape(part), dtype=self.dtype)
        for layer, place in enumerate(out.unbind(0)):
            self._copy(part, layer, place)
        return out


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding a float32 result to `dtype`.

    It includes a margin for the float32 operations by which the result was computed.
    """
    return torch.finfo(dtype).eps / 2 + 2.0**-22


def expect(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """Return the tensor of this name. Raises DamagedBlockError if it is missing or has another shape or dtype."""
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape or found.dtype not in dtypes:
        is_ = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise DamagedBlockError(f"{name} of an encoded block is {is_}, not {' or '.join(map(str, dtypes))} {shape}")
    return found


def _encodable(part: Part, block: KVBlock) -> Tensor:
    numbers = (block.keys if part == "keys" else block.values).detach().cpu()
    if str(numbers.dtype) not in FLOATS or numbers.dtype != block.dtype:
        raise UnencodableBlockError(f"{part} are {numbers.dtype}; float32, bfloat16 and float16 can be encoded")
    if not min(numbers.shape[0], numbers.shape[1], numbers.shape[3]):
        raise UnencodableBlockError(f"{part} have no layers, heads or channels: {tuple(numbers.shape)}")
    # NaN fails every comparison.
    if numbers.numel() and not bool(numbers.float().abs().amax() <= LARGEST):
        layer = next(
            i for i, layer_numbers in enumerate(numbers.float()) if not bool((layer_numbers.abs() <= LARGEST).all())
        )
        raise UnencodableBlockError(
            f"{part} of layer {layer} hold NaN, an infinity or a number beyond {LARGEST:.0e}, which this codec does "
            "not keep; a model in float16 may have overflowed: load it with dtype bfloat16 or float32"
        )
    return numbers
