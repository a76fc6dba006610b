"""What every codec keeps, whatever it does to the bytes; blocks of each kind; int8 and int4 against KIVI's formula in
NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blocks import (
    DTYPES,
    PART_OF,
    make_block,
    make_key,
    make_masks,
    make_mixed_block,
    make_sparse,
    make_unequal,
    same,
    with_first,
)
from covering import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.makers import each
from safetensors import safe_open
from torch import Tensor

from ragcache.codecs import CODECS, Codec, get_codec
from ragcache.codecs.block_file import codec_of, read_block, write_block
from ragcache.errors import DamagedBlockError, UnencodableBlockError
from ragcache.kv.block import KVBlock, MixedBlock, empty_block, example_block
from ragcache.kv.block_key import Recipe
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.kv.sparse_block import keep, pack_mask, unpack_mask

Array = np.ndarray[Any, np.dtype[Any]]
LOSSY = sorted(name for name, codec in CODECS.items() if not codec.lossless)


codec = each(sorted(CODECS), get_codec)


def largest_difference(one: KVBlock, other: KVBlock) -> float:
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return max(float((a.double() - b.double()).abs().max()) if a.numel() else 0.0 for a, b in pairs)


MAKERS = {"plain": make_block, "mixed": make_mixed_block}
KINDS = {
    **MAKERS,
    **{f"{name}, {held.__name__}": lambda *a, make=make, held=held, **b: held(make(*a, **b))
       for name, make in MAKERS.items() for held in (make_sparse, make_unequal)},
}  # fmt: skip
"""Layers alike or not; every token in each head, half of them, or in each layer another number of them."""


@pytest.mark.parametrize(
    ("codec", "kind", "dtype", "num_tokens"),
    covering(
        *(sorted(CODECS), KINDS, DTYPES, [0, 1, 7, 70]),
        together=[(0, 1), (0, 2), (0, 3)],
        where=lambda _, kind, __, num_tokens: num_tokens > 0 or kind in MAKERS,
    ),
    indirect=["codec"],
    ids=str,
)
def test_every_layer_stays_inside_the_bound(
    codec: Codec, kind: str, dtype: torch.dtype, num_tokens: int, tmp_path: Path
) -> None:
    """Law 6, through memory and through a file; a layer that is copied alone is the same."""
    block = KINDS[kind](num_tokens, num_tokens=num_tokens, dtype=dtype)
    codec = codec.for_trial(block)
    written = write_block(tmp_path / "block", make_key(1), block, codec)
    read = read_block(tmp_path / "block", make_key(1), codec.bases)
    assert same(read, written)
    assert same(read, codec.decode(codec.encode(block)))
    assert (read.layers, read.dtype, read.num_tokens) == (block.layers, dtype, num_tokens)
    assert read.tokens_by_layer == block.tokens_by_layer
    assert codec.lossless <= same(read, block)
    bound = codec.error_bound(block)
    assert bound == 0 if codec.lossless else num_tokens < 7 or 0 < bound < 10
    for layer in range(block.num_layers):
        places, wanted = read.places(layer), block.places(layer)
        assert (places is None) == (wanted is None)
        assert places is None or wanted is None or torch.equal(places, wanted)
        for exact, copy in ((block.layer_keys(layer), read.copy_keys), (block.layer_values(layer), read.copy_values)):
            out = torch.full(exact.shape, 7.0)
            copy(layer, out)
            assert out.numel() == 0 or float((out.double() - exact.double()).abs().max()) <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_encoded_is_held_encoded_and_written_again_as_it_is(codec: Codec, kind: str, tmp_path: Path) -> None:
    block = KINDS[kind](1, num_tokens=64)
    codec = codec.for_trial(block)
    held = write_block(tmp_path / "block", make_key(1), block, codec)
    assert codec.lossless or kind != "mixed" or held.num_bytes < block.num_bytes
    again = codec if codec.lossless else codec_of(held)
    assert again.name == codec.name
    write_block(tmp_path / "again", make_key(1), held, again)
    assert unmarked(tmp_path / "again") == unmarked(tmp_path / "block")


def unmarked(path: Path) -> bytes:
    """A file's bytes, with zeros in place of its seal's mark, which is another in each file."""
    with safe_open(path, "pt") as file:
        mark = file.metadata()["seal"].encode()
    assert path.read_bytes().count(mark) == 1
    return path.read_bytes().replace(mark, bytes(len(mark)))


def test_neither_direction_changes_its_input(codec: Codec) -> None:
    block, untouched = make_block(2, num_tokens=20), make_block(2, num_tokens=20)
    codec = codec.for_trial(block)
    tensors = codec.encode(block)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    codec.decode(tensors)
    assert same(block, untouched)
    assert all(torch.equal(tensors[name], copies[name]) for name in copies)


def test_views_of_a_batch_are_encoded_as_their_own_numbers(codec: Codec) -> None:
    batch = torch.randn(2, 2, 40, 4)
    view = batch[:, :, 5:30]
    assert not view.is_contiguous()
    codec = codec.for_trial(KVBlock(view, view))
    decoded = codec.decode(codec.encode(KVBlock(view, view)))
    assert largest_difference(decoded, KVBlock(view.clone(), view.clone())) <= codec.error_bound(decoded)


def test_raw_keeps_every_bit() -> None:
    """Not-a-number, infinities, negative zero and subnormals too."""
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1, -1, 0x00800000, 0, 0x3F800000], dtype=torch.int32)
    values = bits.view(torch.float32).view(1, 1, 2, 4)
    decoded = get_codec("raw").decode(get_codec("raw").encode(KVBlock(values, values)))
    assert torch.equal(decoded.keys.view(torch.int32).flatten(), bits)


LAYERS = {
    "narrow": [(2, 6, 8)] * 3,
    "one head": [(1, 64, 64)],
    "wide": [(3, 128, 130)] * 2,
    "layers that differ": [(2, 8, 8), (1, 16, 12), (2, 8, 8)],
}


@pytest.mark.parametrize(
    ("codec", "layers", "num_tokens", "dtype", "kept"),
    covering(
        *(sorted(CODECS), LAYERS, [1, 3, 4, 5, 63, 64, 65, 300, 600], DTYPES, [1, 0.25]),
        together=[(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 4)],
    ),
    indirect=["codec"],
    ids=str,
)
def test_expected_bytes_are_those_of_a_block(
    codec: Codec, layers: str, num_tokens: int, dtype: torch.dtype, kept: float
) -> None:
    """To the byte; kvtc, whose bytes depend on the numbers: see test_kvtc.py."""
    if codec.needs_basis:
        return
    shapes = [LayerShape(*layer) for layer in LAYERS[layers]]
    tensors = codec.encode(with_first(example_block(shapes, num_tokens, dtype), kept))
    found = sum(tensor.nbytes for tensor in tensors.values())
    assert codec.expected_bytes(shapes, num_tokens, dtype.itemsize, kept) == found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_is_what_the_whole_block_holds(codec: Codec, dtype: torch.dtype) -> None:
    """Wherever it is written: into part of a wider tensor, and into other dtypes by way of the block's own."""
    block = random_block(70, (6, 8), dtype)
    codec = codec.for_trial(block)
    decoded = codec.decode(codec.encode(block))
    assert (decoded.key_shape, decoded.value_shape) == (block.keys.shape, block.values.shape)
    assert (decoded.keys.shape, decoded.values.shape) == (block.keys.shape, block.values.shape)
    for layer in range(decoded.num_layers):
        for out_dtype in (dtype, torch.float32, torch.bfloat16):
            keys, values = (torch.full((2, 90, width), -7, dtype=out_dtype) for width in (6, 8))
            decoded.copy_keys(layer, keys[:, 10:80])
            decoded.copy_values(layer, values[:, 10:80])
            assert torch.equal(keys[:, 10:80], decoded.keys[layer].to(out_dtype))
            assert torch.equal(values[:, 10:80], decoded.values[layer].to(out_dtype))
            assert all(bool((one[:, :10] == -7).all() and (one[:, 80:] == -7).all()) for one in (keys, values))
        assert torch.equal(decoded.layer_keys(layer), decoded.keys[layer])
        assert torch.equal(decoded.layer_values(layer), decoded.values[layer])


def test_a_copy_is_the_same_block_in_bytes_of_its_own(codec: Codec) -> None:
    block = random_block(40, (8, 8), torch.float32)
    codec = codec.for_trial(block)
    encoded = codec.decode(codec.encode(block))
    given: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor)
        return tensor.clone()

    copy = encoded.map(copied)
    assert copy.num_bytes == encoded.num_bytes == sum(tensor.nbytes for tensor in given)
    before = copy.keys.clone(), copy.values.clone()
    for tensor in given:
        tensor.view(-1).view(torch.uint8).zero_()
    assert torch.equal(copy.keys, before[0])
    assert torch.equal(copy.values, before[1])


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("kind", "part", "said"),
    [("plain", "keys", ""), ("plain", "values", ""), ("mixed", "keys", r"counting only layers \[1, 3\], ")],
)
def test_what_cannot_be_kept_is_refused_by_the_blocks_name(
    name: str, bad: float, kind: str, part: str, said: str, tmp_path: Path
) -> None:
    """And by the layers that are alike, where they differ."""
    block = KINDS[kind](1)
    codec = get_codec(name).for_trial(block)
    held = block.parts[1] if isinstance(block, MixedBlock) else block
    getattr(held, part)[1, 0, 3, 2] = bad
    with pytest.raises(UnencodableBlockError, match=f"block {make_key(1)} .*{name}.*{said}{part} of layer 1"):
        write_block(tmp_path / "block", make_key(1), block, codec)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", LOSSY)
def test_other_dtypes_empty_dimensions_and_huge_numbers_are_refused(name: str) -> None:
    codec = get_codec(name).for_trial(make_block(1))
    wrong = [torch.zeros(2, 2, 5, 4, dtype=torch.float64), torch.zeros(2, 2, 5, 0), torch.zeros(0, 2, 5, 4)]
    for numbers in [*wrong, torch.zeros(2, 0, 5, 4), torch.full((1, 1, 1, 1), 3e38)]:
        with pytest.raises(UnencodableBlockError):
            codec.encode(KVBlock(numbers, numbers))
    mixed = torch.zeros(2, 2, 5, 4)
    with pytest.raises(UnencodableBlockError):
        codec.encode(KVBlock(mixed, mixed.bfloat16()))


WRONG_PARTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda held: held[:-1], lambda held: held[:0], lambda held: held[None], lambda held: held.int(),
    lambda held: held + 1, lambda held: held - 1, lambda held: 1 - held, lambda held: held * 2,
]  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_every_missing_foreign_or_misshapen_tensor_is_damage(codec: Codec, kind: str) -> None:
    block = KINDS[kind](1, num_tokens=9)
    codec = codec.for_trial(block)
    tensors = codec.encode(block)
    changes = [{**tensors, more: torch.zeros(1)} for more in ("more", "keys.more", "0.more", "2.keys")]
    if kind == "mixed":
        changes += [{**tensors, "part_of": change(tensors["part_of"])} for change in WRONG_PARTS]
    for name, tensor in tensors.items():
        changes.append({other: kept for other, kept in tensors.items() if other != name})
        changes.append({**tensors, name: tensor[None]})
        if kind == "plain":
            changes.append({**tensors, name: tensor.new_zeros((3, 3))})
            changes += [] if codec.lossless else [{**tensors, name: tensor.to(torch.int32)}]
    for changed in changes:
        with pytest.raises(DamagedBlockError):
            codec.decode(changed)


def test_another_codecs_tensors_are_damage(codec: Codec) -> None:
    block = random_block(9, (8, 8), torch.float32)
    for name in sorted(set(CODECS) - {codec.name} - ({"raw", "samkv"} if codec.lossless else set())):
        with pytest.raises(DamagedBlockError):
            codec.decode(get_codec(name).for_trial(block).encode(block))


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.integers(1, 140),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 140)),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-7, 1e-3, 1.0, 30.0, 60000.0]),
    offset=st.sampled_from([0.0, 1.0, -50.0]),
    shape=st.sampled_from(["normal", "heavy", "constant", "steps", "zero"]),
)
def test_no_number_is_further_off_than_the_bound(
    name: str, seed: int, num_tokens: int, dims: tuple[int, int], dtype: torch.dtype, scale: float, offset: float,
    shape: str,
) -> None:  # fmt: skip
    """Law 6. Channels that are large, far from zero, constant, or that drift from token to token."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(width: int) -> torch.Tensor:
        noise = torch.randn(2, 2, num_tokens, width, generator=generator)
        kinds = {
            "normal": noise,
            "heavy": noise**3 * torch.randn(2, 2, 1, width, generator=generator).exp(),
            "constant": noise[:, :, :1].expand_as(noise),
            "steps": noise.cumsum(2),
            "zero": torch.zeros_like(noise),
        }
        limit = min(60000.0, torch.finfo(dtype).max)
        return ((kinds[shape] + offset) * scale).clamp(-limit, limit).to(dtype)

    block = KVBlock(numbers(dims[0]), numbers(dims[1]))
    codec = get_codec(name).for_trial(block)
    decoded = codec.decode(codec.encode(block))
    assert bool(decoded.keys.isfinite().all() and decoded.values.isfinite().all())
    assert largest_difference(block, decoded) <= codec.error_bound(block)


def random_block(num_tokens: int, dims: tuple[int, int], dtype: torch.dtype) -> KVBlock:
    generator = torch.Generator().manual_seed(num_tokens)
    keys, values = (torch.randn(2, 2, num_tokens, width, generator=generator).to(dtype) for width in dims)
    return KVBlock(keys, values)


# Blocks whose layers differ in heads and widths, and whose heads hold some tokens alone.


def layers_of(block: MixedBlock) -> list[tuple[Tensor, Tensor]]:
    """Keys and values by layer, read off the parts by hand: layer 3 is the second of the second part."""
    first, second = block.parts
    order = [(first, 0), (second, 0), (first, 1), (second, 1), (first, 2)]
    return [(part.keys[rank], part.values[rank]) for part, rank in order]


def test_a_layer_is_its_parts_layer() -> None:
    block = make_mixed_block(1)
    wide, narrow = LayerShape(2, 6, 4), LayerShape(1, 10, 10)
    assert block.layers == (wide, narrow, wide, narrow, wide)
    assert (block.num_layers, block.num_tokens, block.dtype) == (5, 5, torch.float32)
    assert block.num_bytes == 5 * 4 * (3 * 2 * (6 + 4) + 2 * 1 * (10 + 10))
    for layer, (keys, values) in enumerate(layers_of(block)):
        assert torch.equal(block.layer_keys(layer), keys)
        assert torch.equal(block.layer_values(layer), values)


def test_an_empty_block_has_the_shape_asked_for_and_room_of_its_own_in_every_layer() -> None:
    block = make_mixed_block(2)
    made = empty_block(CacheShape(block.layers, block.dtype, torch.device("cpu")), block.num_tokens)
    assert made.layers == block.layers
    for layer, (keys, values) in enumerate(layers_of(block)):
        made.layer_keys(layer).copy_(keys)
        made.layer_values(layer).copy_(values)
    assert same(made, block)
    alike = empty_block(CacheShape((LayerShape(2, 3, 4),) * 3, torch.float32, torch.device("cpu")), 7)
    assert (alike.keys.shape, alike.values.shape) == ((3, 2, 7, 3), (3, 2, 7, 4))
    assert alike.keys.is_contiguous()


def test_blocks_are_cut_named_and_compared_in_every_layer() -> None:
    block = make_mixed_block(3)
    assert block.made_by(Recipe.of("isolated")).map(torch.clone).recipe == Recipe.of("isolated")
    cut = block.map(lambda held: held[:, :, :2])
    assert cut.num_tokens == 2
    for layer, (keys, values) in enumerate(layers_of(block)):
        assert torch.equal(cut.layer_keys(layer), keys[:, :2])
        assert torch.equal(cut.layer_values(layer), values[:, :2])
    for part in range(2):
        changed = block.map(torch.clone)
        assert isinstance(changed, MixedBlock)
        assert same(changed, block)
        changed.parts[part].values[1, 0, 4, 3] += 1
        assert not same(changed, block)
    assert not same(block, make_block(1))
    assert not same(make_block(1), block)


def test_a_layer_is_read_from_its_own_range_of_the_file(tmp_path: Path) -> None:
    """The layers of a part lie in a row, in ascending order: any safetensors reader finds one."""
    block = make_mixed_block(5)
    write_block(tmp_path / "block", make_key(1), block, get_codec("raw"))
    with safe_open(tmp_path / "block", framework="pt") as file:
        for layer, (keys, values) in enumerate(layers_of(block)):
            part = PART_OF[layer]
            rank = PART_OF[:layer].count(part)
            assert torch.equal(file.get_slice(f"{part}.keys")[rank], keys)
            assert torch.equal(file.get_slice(f"{part}.values")[rank], values)


def test_parts_that_are_not_one_blocks_are_damage() -> None:
    first, second = make_mixed_block(1).parts
    longer, other = make_mixed_block(1, num_tokens=6).parts[1], make_mixed_block(1, dtype=torch.float16).parts[1]
    cases: list[tuple[list[KVBlock], tuple[int, ...]]] = [
        ([first, longer], PART_OF), ([first, other], PART_OF), ([first], PART_OF), ([second, first], PART_OF),
        ([first, second], PART_OF[:4]), ([first, second], (0, 1, 0, 2, 0)), ([], ()),
    ]  # fmt: skip
    for parts, part_of in cases:
        with pytest.raises(DamagedBlockError):
            MixedBlock(parts, part_of)


# Heads that hold some tokens alone


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 70])
def test_bits_of_a_mask(num_tokens: int) -> None:
    mask = torch.rand(2, 3, num_tokens) < 0.5
    packed = pack_mask(mask)
    assert packed.shape == (2, 3, -(-num_tokens // 8))
    for layer in range(2):
        for head in range(3):
            bits = sum(1 << place for place in range(num_tokens) if mask[layer, head, place])
            assert bytes(packed[layer, head].tolist()) == bits.to_bytes(packed.shape[2], "little")
    assert torch.equal(unpack_mask(packed, num_tokens), mask)


@pytest.mark.parametrize("make", MAKERS.values())
def test_a_head_holds_its_own_tokens_in_order(make) -> None:
    block = make(3, num_tokens=20)
    masks = make_masks(block, 6)
    sparse = keep(block, masks).made_by(Recipe(kept=0.3))
    assert (sparse.num_tokens, set(sparse.tokens_by_layer), sparse.layers) == (20, {6}, block.layers)
    assert sparse.recipe == Recipe(kept=0.3)
    assert sparse.num_bytes < block.num_bytes
    for layer, shape in enumerate(block.layers):
        for head in range(shape.num_kv_heads):
            own = [token for token in range(20) if masks[layer][head, token]]
            places = sparse.places(layer)
            assert places is not None
            assert places[head].tolist() == own
            assert torch.equal(sparse.layer_keys(layer)[head], block.layer_keys(layer)[head, own])
            assert torch.equal(sparse.layer_values(layer)[head], block.layer_values(layer)[head, own])


@pytest.mark.parametrize("make", MAKERS.values())
def test_other_tokens_make_another_block(make) -> None:
    block = make(4, num_tokens=20)
    masks = make_masks(block, 6)
    assert same(keep(block, masks), keep(block, make_masks(block, 6)))
    assert same(keep(block, masks).map(torch.clone), keep(block, masks))
    block = block.map(torch.zeros_like)  # so that the tokens alone differ
    assert not same(keep(block, masks), keep(block, make_masks(block, 6, seed=1)))
    assert not same(keep(block, masks), make(4, num_tokens=6))


def test_wrong_bits_are_damage(codec: Codec) -> None:
    block = make_sparse(make_block(1, num_tokens=20), 8)
    codec = codec.for_trial(block)
    tensors = codec.encode(block)
    kept = tensors["1.kept"]
    one_more, behind = kept.clone(), kept.clone()
    one_more[0, 0, 0] ^= 1
    behind[0, 1, 2] |= 0x80
    wrong = [
        {**tensors, "1.kept": one_more},
        {**tensors, "1.kept": behind},
        {**tensors, "1.kept": kept[:, :1]},
        {**tensors, "1.kept": kept.to(torch.int64)},
        {**tensors, "1.tokens": torch.tensor([-1])},
        {**tensors, "1.tokens": torch.tensor([40])},
        {**tensors, "1.tokens": torch.tensor([20, 20])},
        {name: tensor for name, tensor in tensors.items() if name != "1.tokens"},
        {name: tensor for name, tensor in tensors.items() if name != "1.kept"},
    ]
    for changed in wrong:
        with pytest.raises(DamagedBlockError):
            codec.decode(changed)


# int8 and int4, number by number


def block_of(num_tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> KVBlock:
    """Keys with some large channels far from zero, as models have them."""
    rng = np.random.default_rng(seed)
    keys, values = (rng.standard_normal((3, 2, num_tokens, width)) for _ in range(2))
    keys[..., :: max(1, width // 5)] = keys[..., :: max(1, width // 5)] * 4 + 9
    return KVBlock(*(torch.from_numpy(one).to(dtype) for one in (keys, values)))


def groups(length: int, largest: int) -> list[slice]:
    """Count as few groups as there can be, of like size."""
    count = -(-length // largest)
    size = -(-length // count)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def kivi(numbers: Array, axis: int, largest: int, bits: int) -> tuple[Array, Array]:
    """KIVI, section 3, one group after another: what each number becomes, in float64, and its group's step.

    z and s are rounded to float16, outwards.
    """
    levels = 2**bits - 1
    moved = np.moveaxis(numbers, axis, -1).astype(np.float64)
    restored, steps = np.empty_like(moved), np.empty_like(moved)
    for index in np.ndindex(*moved.shape[:-1]):
        for group in groups(moved.shape[-1], largest):
            x = moved[index][group]
            z = np.float16(x.min())
            z = np.nextafter(z, np.float16(-np.inf)) if z > x.min() else z
            exact = (x.max() - np.float64(z)) / levels
            s = np.float16(exact)
            s = np.nextafter(s, np.float16(np.inf)) if s < exact else s
            codes = np.clip(np.rint((x - np.float64(z)) / np.float64(s)), 0, levels) if s else 0 * x
            restored[index][group] = codes * np.float64(s) + np.float64(z)
            steps[index][group] = np.float64(s)
    return np.moveaxis(restored, -1, axis), np.moveaxis(steps, -1, axis)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "bits", "largest"), [("int8", 8, (512, 128)), ("int4", 4, (64, 64))])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (33, 20), (150, 70)])
def test_integers_are_kivis(
    name: str, bits: int, largest: tuple[int, int], dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    """Keys by channel in groups of tokens, values by token in groups of channels. Only numbers that lie half-way
    between two steps may go the other way: the codec divides in float32."""
    block = block_of(num_tokens, width, dtype)
    decoded = get_codec(name).decode(get_codec(name).encode(block))
    for got, original, axis, most in (
        (decoded.keys, block.keys, 2, largest[0]),
        (decoded.values, block.values, 3, largest[1]),
    ):
        numbers = original.double().numpy()
        expected, steps = kivi(numbers, axis, most, bits)
        rounded = torch.from_numpy(expected).float().to(dtype).double().numpy()
        ulp = float(torch.finfo(dtype).eps) * np.abs(expected)
        off = np.abs(got.double().numpy() - rounded)
        at_half = np.abs(np.abs(numbers - expected) - steps / 2) <= 1e-3 * steps
        assert np.all((off <= ulp) | (at_half & (off <= steps * 1.001 + ulp)))
        assert np.all(np.abs(got.double().numpy() - numbers) <= steps * 0.5003 + ulp)


def test_large_numbers_are_kept_in_float16_blocks() -> None:
    """Nothing overflows where the numbers end."""
    numbers = torch.linspace(-65504, 65504, 4096).to(torch.float16).view(1, 1, 64, 64)
    for name in sorted(CODECS):  # the contract's block, at the end of its dtype
        codec = get_codec(name).for_trial(KVBlock(numbers, numbers))
        decoded = codec.decode(codec.encode(KVBlock(numbers, numbers)))
        assert bool(decoded.keys.isfinite().all() and decoded.values.isfinite().all())
