"""The codec contract: how a block's tensors become the tensors of a file, and back, and what codecs learn for that."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

from ragcache.codecs.basis import Bases
from ragcache.errors import BasisError, DamagedBlockError, UnencodableBlockError
from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.kv.cache_shape import LayerShape, StateShape
from ragcache.kv.opaque_block import DATA, OpaqueBlock
from ragcache.kv.recurrent_block import HybridBlock
from ragcache.kv.sparse_block import SparseBlock
from ragcache.kv.state import StateMap
from ragcache.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from ragcache.kv.exact import Exact


_PART_OF = "part_of"
_INT64 = 8  # bytes
_KEPT, _TOKENS = "kept", "tokens"
_STATE = "state."


class Codec(ABC):
    """Encodes a KV block as named tensors, and decodes them.

    name:          its name in the registry and in every file
    version:       increases whenever the code could no longer decode files written before; a file of a higher version
                   than the code's is refused, and a file of a lower version must still be decoded
    lossless:      whether every bit is restored
    needs_basis:   whether blocks are encoded with a basis that is first made from passages
    rounds_states: whether a block's maps of recurrent layers' states are stored in int8; otherwise they are stored
                   unchanged
    bases:         the bases by name, for a codec that needs a basis

    Everything that `decode` needs must be in the tensors, or in a basis that a tensor names. Decoding may return views
    of its input and never writes to it: the tensors may alias a mapped file.

    Subclasses encode layers that are alike. A block whose layers differ is encoded part by part, each by `of_part`:
    tensors `0.<name>`, `1.<name>`, ..., and `part_of`, int64 [num_layers]. A block, or part, whose heads hold only some
    of its tokens is encoded as the tokens that they hold, with `kept`, uint8 [num_layers, num_kv_heads, ceil(num_tokens
    / 8)], a bit a token, and `tokens`, int64 [1], the number of tokens. A block's maps of recurrent layers' states are
    `state.<layer>.p`, `.q` and `.tail`, and for rounded maps also `.p_scales` and `.q_scales` (`kv/state.py`). A block
    that another engine wrote is stored unchanged, as `opaque` and `span` (`kv/opaque_block.py`).
    """

    name: ClassVar[str]
    version: ClassVar[int]
    lossless: ClassVar[bool] = False
    needs_basis: ClassVar[bool] = False
    rounds_states: ClassVar[bool] = False

    def __init__(self, bases: Bases | None = None) -> None:
        self.bases = bases or Bases()

    @property
    def now(self) -> Codec:
        """Return the codec for new blocks: this codec, or a substitute while the basis that it needs is missing."""
        return self

    def fit_basis(self, blocks: Sequence[KVBlock]) -> KVBlock:
        """Return the basis of these passages' blocks, all of the same model. Raises BasisError if there are too few."""
        raise BasisError(f"codec {self.name!r} needs no basis")

    def for_trial(self, example: KVBlock) -> Codec:
        """Return this codec, with a basis for blocks like `example` if it needs a basis.

        It is used to measure times before any passages are known.
        """
        return self

    def of_part(self, number: int) -> Codec:
        """Return the codec that encodes and decodes part `number` of blocks whose layers differ."""
        return self

    def beside(self, lm: object, ids: Sequence[int], block: KVBlock, prefix: Exact | None) -> KVBlock:
        """Return the block with the additional data that the codec stores with it; the base class adds none.

        lm:     the LanguageModel that has just computed the block
        ids:    ids that it ran; the block holds all of them, or the last ones
        prefix: KV that the ids were read after; None: they were read from position 0
        """
        return block

    @abstractmethod
    def encode_alike(self, block: KVBlock) -> dict[str, Tensor]:
        """Return the tensors to store. They may be views of the block's.

        Raises UnencodableBlockError for numbers or dtypes that the codec cannot encode.
        """

    @abstractmethod
    def decode_alike(self, tensors: Mapping[str, Tensor]) -> KVBlock:
        """Return the block for `encode_alike`'s tensors, in its original dtype.

        Raises DamagedBlockError if they do not form a block.
        """

    @abstractmethod
    def bound_alike(self, block: KVBlock) -> float:
        """Return the largest absolute error that the block may have after decoding (law 6); 0.0 if lossless."""

    @abstractmethod
    def expected_bytes_alike(self, num_layers: int, layer: LayerShape, num_tokens: int, itemsize: int) -> float:
        """Return the bytes of `encode_alike`'s tensors for a block of this shape.

        itemsize: bytes of a number of the block
        """

    def expected_bytes(self, layers: Sequence[LayerShape], num_tokens: int, itemsize: int, kept: float = 1.0) -> float:
        """Compute the bytes of `encode`'s tensors for a block of this shape.

        Nothing is encoded, and PyTorch is not loaded. The result is an estimate for codecs whose bytes depend on the
        numbers.

        itemsize: bytes of a number of the block
        kept:     share of its tokens that a head holds, as a mean over the layers; all layers are assumed to hold
                  equally many
        """
        if kept < 1:
            held, bits = math.ceil(kept * num_tokens), -(-num_tokens // 8)
            found = sum(
                self.expected_bytes_alike(1, layer, held, itemsize) + layer.num_kv_heads * bits for layer in layers
            )
            return found + 2 * _INT64 * len(layers)
        counts = Counter(layers)
        parts = sum(self.expected_bytes_alike(count, alike, num_tokens, itemsize) for alike, count in counts.items())
        return parts + (_INT64 * len(layers) if len(counts) > 1 else 0)

    def expected_state_bytes(self, states: Sequence[StateShape], itemsize: int) -> int:
        """Return the bytes that a block takes for recurrent layers of these shapes, whatever its length.

        The shortest blocks take fewer. itemsize: bytes of a number of the block
        """
        return sum(state.map_bytes(itemsize, rounded=self.rounds_states) for state in states)

    def encode(self, block: KVBlock) -> dict[str, Tensor]:
        """Return the tensors to store, for any kind of block.

        Raises UnencodableBlockError for numbers or dtypes that the codec cannot encode.
        """
        if isinstance(block, OpaqueBlock):
            return block.tensors
        if isinstance(block, HybridBlock):
            maps = [self._rounded(rank, state) for rank, state in enumerate(block.states)]
            named = {
                f"{_STATE}{rank}.{name}": t for rank, state in enumerate(maps) for name, t in state.tensors.items()
            }
            return {**self.encode(block.kv), **named}
        if not isinstance(block, MixedBlock):
            return self._encode_sparse(block)
        tensors = {_PART_OF: torch.tensor(block.part_of, dtype=torch.int64)}
        for number, part in enumerate(block.parts):
            try:
                encoded = self.of_part(number)._encode_sparse(part)
            except UnencodableBlockError as error:
                layers = [layer for layer, own in enumerate(block.part_of) if own == number]
                raise UnencodableBlockError(f"counting only layers {layers}, {error}") from error
            tensors |= {f"{number}.{name}": tensor for name, tensor in encoded.items()}
        return tensors

    def decode(self, tensors: Mapping[str, Tensor]) -> KVBlock:
        """Return the block for `encode`'s tensors, in its original dtype.

        Raises DamagedBlockError if they do not form a block.
        """
        if DATA in tensors:
            return OpaqueBlock.read(tensors)
        maps = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name.startswith(_STATE)}
        if maps:
            kv = self.decode({name: tensor for name, tensor in tensors.items() if not name.startswith(_STATE)})
            return HybridBlock(kv, _state_maps(maps, kv.num_tokens))
        if _PART_OF not in tensors:
            return self._decode_sparse(tensors)
        part_of = tensors[_PART_OF]
        if part_of.dim() != 1 or part_of.dtype != torch.int64 or not part_of.numel():
            raise DamagedBlockError("the tensor part_of of a block whose layers differ must be int64 [num_layers]")
        parts: dict[str, dict[str, Tensor]] = {str(number): {} for number in sorted(set(part_of.tolist()))}
        for name, tensor in tensors.items():
            number, _, own = name.partition(".")
            if number in parts:
                parts[number][own] = tensor
            elif name != _PART_OF:
                raise DamagedBlockError(f"no layer of a block is in the part that {name!r} belongs to")
        decoded = [self.of_part(int(number))._decode_sparse(part) for number, part in parts.items()]
        return MixedBlock(decoded, part_of.tolist())

    def _rounded(self, rank: int, state: StateMap) -> StateMap:
        if not self.rounds_states:
            return state
        if not all(bool(tensor.isfinite().all()) for tensor in state.tensors.values()):
            raise UnencodableBlockError(f"the map of recurrent layer {rank} holds infinite numbers or NaN")
        return state.rounded()

    def error_bound(self, block: KVBlock) -> float:
        """Return the largest absolute error that any kind of block may have after decoding; 0.0 if lossless.

        The error of maps of recurrent layers' states is included. Raises UnencodableBlockError.
        """
        if isinstance(block, OpaqueBlock):
            return 0.0
        if isinstance(block, HybridBlock):
            maps = (self._rounded(rank, state).bound for rank, state in enumerate(block.states))
            return max(self.error_bound(block.kv), *maps)
        if isinstance(block, MixedBlock):
            return max(self.of_part(number).error_bound(part) for number, part in enumerate(block.parts))
        return self.bound_alike(block.held if isinstance(block, SparseBlock) else block)

    def _encode_sparse(self, block: KVBlock) -> dict[str, Tensor]:
        if not isinstance(block, SparseBlock):
            return self.encode_alike(block)
        num_tokens = torch.tensor([block.num_tokens], dtype=torch.int64)
        return {**self.encode_alike(block.held), _KEPT: block.bits.cpu(), _TOKENS: num_tokens}

    def _decode_sparse(self, tensors: Mapping[str, Tensor]) -> KVBlock:
        if _KEPT not in tensors:
            return self.decode_alike(tensors)
        number = tensors.get(_TOKENS)
        if number is None or number.shape != (1,) or number.dtype != torch.int64 or int(number) < 0:
            raise DamagedBlockError("the tensor tokens, of a block that holds some of them, is int64 [1], 0 or more")
        held = self.decode_alike({name: tensor for name, tensor in tensors.items() if name not in (_KEPT, _TOKENS)})
        return SparseBlock(held, tensors[_KEPT], int(number))


def _state_maps(tensors: Mapping[str, Tensor], num_tokens: int) -> list[StateMap]:
    """Return the maps of recurrent layers' states that the tensors `<rank>.p`, `.q`, `.tail` and so on form.

    num_tokens: of their block

    Raises DamagedBlockError if the tensors form no maps over so many tokens.
    """
    count, maps = sum(name.endswith(".tail") for name in tensors), []
    for rank in range(count):
        held = {field.name: tensors.get(f"{rank}.{field.name}") for field in fields(StateMap)}
        p, q, tail = held["p"], held["q"], held["tail"]
        if tail is None or tail.dim() != 2 or tail.shape[1] > num_tokens or (p is None) != (q is None):
            break
        if not (_is_scaled(p, held["p_scales"]) and _is_scaled(q, held["q_scales"])):
            break
        maps.append(StateMap(**held))  # type: ignore[arg-type]
    if not count or len(maps) < count or sum(len(state.tensors) for state in maps) != len(tensors):
        raise DamagedBlockError(f"the tensors {sorted(tensors)} are no maps of recurrent layers' states")
    return maps


def _is_scaled(numbers: Tensor | None, scales: Tensor | None) -> bool:
    """Return whether int8 numbers have a float32 scale for each row, and other numbers have no scales."""
    if numbers is None or numbers.dtype != torch.int8:
        return scales is None
    return scales is not None and scales.dtype == torch.float32 and scales.shape == (*numbers.shape[:-1], 1)
