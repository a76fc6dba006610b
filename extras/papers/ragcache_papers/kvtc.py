"""Transform coding by a basis that is learned once: KVTC (2511.01815)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import ClassVar

from ragcache.codecs.base import Codec
from ragcache.codecs.basis import Bases
from ragcache.codecs.layered import BlockSpec, LayerCodec, Part, PartShape, expect, unit_roundoff
from ragcache.codecs.none import RawCodec
from ragcache.errors import DamagedBlockError, UnencodableBlockError
from ragcache.kv.block import KVBlock
from ragcache.kv.cache_shape import LayerShape
from ragcache.lazy_torch import Tensor, torch
from ragcache_papers.frames import check_frames, pack_frames
from ragcache_papers.kvtc_basis import Basis
from ragcache_papers.kvtc_fit import FEATURES, fit_basis, layer_groups, stand_in, usual_ratio
from ragcache_papers.kvtc_transform import FIRST_TOKENS, WIDTHS, Group

_NAME_BYTES = 32  # of a basis
_EXACT_BYTES = 2  # most bytes of a number of an exact token


def _exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a block of this dtype holds its exact tokens."""
    return dtype if dtype.itemsize <= _EXACT_BYTES else torch.bfloat16


class KvtcCodec(LayerCodec):
    """KVTC's three steps: a transform that decorrelates, quantisation with bits by component, entropy coding.

    1. A token's keys before RoPE in the layers of a group are one vector, and its values another. Principal components
       of the store's own passages (see `kvtc_basis`) remove the vectors' correlations.
    2. Each component has its own step, and codes of 8, 4 or 2 bits; most have none.
    3. The codes of each width are packed and entropy-coded by zstandard (KVTC: DEFLATE).

    The first token of a passage, which is an attention sink, is kept exact, and so is every token that would be
    restored with an error beyond its group's limit. KVTC keeps the first 4, which after KVzip would be more
    bytes than all others, and the last 128: the window in which an answer is generated; a passage has no such place,
    so there are none by default. Exact means 16 bits, as in the paper, whose models have 16 bits: a float32
    block's exact tokens are rounded to bfloat16.

    Tensors, for keys and for values: `basis`, uint8 [32], the basis's name; `exact`, int64, the exact tokens in order;
    `numbers`, [num_layers, num_kv_heads, len(exact), head_dim], the exact tokens' numbers, in 16 bits;
    `stream` and `ends`, three frames a group: the codes of the other tokens, by component, of 8, 4 and 2 bits.

    The error bound is the largest of a group's error (`Group.largest_error`) with the rounding to the block's dtype, or
    the rounding error of the exact tokens, if it is larger.
    """

    name: ClassVar[str] = "kvtc"
    version: ClassVar[int] = 1
    needs_basis: ClassVar[bool] = True
    rounds_states: ClassVar[bool] = True
    part_names: ClassVar[frozenset[str]] = frozenset({"basis", "exact", "numbers", "stream", "ends"})

    def __init__(self, bases: Bases | None = None, *, first_tokens: int = FIRST_TOKENS, last_tokens: int = 0) -> None:
        super().__init__(bases)
        self.first_tokens = first_tokens
        self.last_tokens = last_tokens
        self._number = 0
        self._is_sparse = False

    def of_part(self, number: int) -> Codec:
        """Return the codec of a part: each part has its own groups in the basis."""
        found = copy(self)
        found._number = number
        return found

    @property
    def now(self) -> Codec:
        """Return this codec, or the raw codec until there is a basis."""
        return self if self.bases.name is not None else RawCodec()

    def for_trial(self, example: KVBlock) -> Codec:
        bases = Bases()
        bases.add(stand_in(example))
        return KvtcCodec(bases, first_tokens=self.first_tokens, last_tokens=self.last_tokens)

    def fit_basis(self, blocks: Sequence[KVBlock]) -> KVBlock:
        return fit_basis(blocks)

    def encode_part(self, part: Part, numbers: Tensor) -> dict[str, Tensor]:
        name = self.bases.name
        if name is None:
            raise UnencodableBlockError("there is no basis yet; an ingestion makes one, see docs/storage.md")
        groups = self.bases.get(name, Basis).groups(self._number, part, tuple(numbers.shape))
        if groups is None:
            raise UnencodableBlockError(f"the basis was made from other layers than {tuple(numbers.shape)}")
        tokens = torch.arange(numbers.shape[2])
        kept = (tokens < self.first_tokens) | (tokens >= len(tokens) - self.last_tokens)
        codes = []
        for group in groups:
            features = group.features(numbers)
            codes.append(group.encode(features))
            kept |= group.errors(features, codes[-1]) > group.limit
        frames = [frame for group, own in zip(groups, codes, strict=True) for frame in group.pack(own[~kept])]
        return {
            "basis": torch.tensor(list(bytes.fromhex(name)), dtype=torch.uint8),
            "exact": tokens[kept],
            "numbers": numbers[:, :, kept].to(_exact_dtype(numbers.dtype)),
            **pack_frames(frames),
        }

    def check_part(self, part: Part, tensors: Mapping[str, Tensor], spec: BlockSpec) -> None:
        layers, heads, num_tokens, width = spec.shape(part)
        exact = expect(tensors, "exact", (tensors["exact"].numel(),), torch.int64)
        bounds = [-1, *exact.tolist(), num_tokens]
        if bounds != sorted(set(bounds)):
            raise DamagedBlockError("the exact tokens of a block are not some of its tokens in ascending order")
        expect(tensors, "numbers", (layers, heads, len(exact), width), _exact_dtype(spec.dtype))
        groups = self._groups(self._basis(tensors), part, spec.shape(part))
        expect(tensors, "stream", (tensors["stream"].numel(),), torch.uint8)
        expect(tensors, "ends", (len(WIDTHS) * len(groups),), torch.int64)
        check_frames(tensors, [size for group in groups for size in group.packed_sizes(num_tokens - len(exact))])

    def decode_part(self, part: Part, tensors: Mapping[str, Tensor], layer: int, out: Tensor) -> None:
        heads, num_tokens, width = out.shape
        exact, numbers = tensors["exact"], tensors["numbers"]
        basis = self._basis(tensors)
        groups = self._groups(basis, part, (len(numbers), heads, num_tokens, width))
        number, group = next((n, group) for n, group in enumerate(groups) if layer in group.layers)
        codes = basis.recent.get(
            tensors["stream"], number, lambda: group.unpack(tensors, len(WIDTHS) * number, num_tokens - len(exact))
        )
        codes, first = codes.to(out.device), len(exact)
        if not first or int(exact[-1]) == first - 1:  # nearly always only the first tokens are exact: no index
            out[:, :first] = numbers[layer]
            group.restore(codes, layer, out[:, first:])
            return
        restored = out.new_empty(heads, num_tokens - first, width)
        group.restore(codes, layer, restored)
        coded = torch.ones(num_tokens, dtype=torch.bool).index_fill_(0, exact.cpu(), False).nonzero().flatten()
        out.index_copy_(1, coded.to(out.device), restored)
        out.index_copy_(1, exact.to(out.device), numbers[layer].to(out.device).float())

    def part_bound(self, part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        numbers = tensors["numbers"]
        layers, heads, _, width = numbers.shape
        groups = self._groups(self._basis(tensors), part, (layers, heads, 0, width))
        coded = max(group.largest_error * (1 + 2.0**-12) + group.reach * unit_roundoff(dtype) for group in groups)
        if numbers.dtype == dtype or not numbers.numel():
            return coded
        return max(coded, float(numbers.float().abs().max()) * unit_roundoff(numbers.dtype) * (1 + 2.0**-7))

    def expected_bytes(self, layers: Sequence[LayerShape], num_tokens: int, itemsize: int, kept: float = 1.0) -> float:
        found = copy(self)
        found._is_sparse = kept < 1
        return super(KvtcCodec, found).expected_bytes(layers, num_tokens, itemsize, kept)

    def expected_part_bytes(self, part: Part, shape: PartShape) -> float:
        """Return the bytes that a basis is fitted to. Tokens that are exact because of their error are not counted."""
        tokens = min(shape.num_tokens, self.first_tokens + self.last_tokens)
        exact = shape._replace(num_tokens=tokens, itemsize=min(shape.itemsize, _EXACT_BYTES))
        groups = sum(1 for _ in layer_groups(shape.num_layers, shape.num_kv_heads * shape.dim, FEATURES))
        stream = 2 * (shape.numbers - exact.numbers) / usual_ratio(self._is_sparse)
        return _NAME_BYTES + tokens * 8 + exact.numbers * exact.itemsize + stream + 8 * len(WIDTHS) * groups

    def _basis(self, tensors: Mapping[str, Tensor]) -> Basis:
        name = bytes(expect(tensors, "basis", (_NAME_BYTES,), torch.uint8).tolist()).hex()
        return self.bases.get(name, Basis)

    def _groups(self, basis: Basis, part: Part, shape: tuple[int, ...]) -> Sequence[Group]:
        groups = basis.groups(self._number, part, shape)
        if groups is None:
            raise DamagedBlockError(f"the block's basis was made from other layers than its {shape}")
        return groups
