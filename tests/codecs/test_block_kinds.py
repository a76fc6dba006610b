"""Blocks whose layers differ in heads and widths, and whose heads hold some tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blocks import PART_OF, make_block, make_key, make_masks, make_mixed_block, make_sparse, with_first
from safetensors import safe_open
from torch import Tensor

from ragcache.codecs import CODECS, Codec, get_codec
from ragcache.codecs.base import example_block
from ragcache.codecs.block_file import read_block, write_block
from ragcache.codecs.container import read_container, write_container
from ragcache.errors import DamagedBlockError, SchemaVersionError, UnencodableBlockError
from ragcache.kv.block import KVBlock, MixedBlock, SparseBlock, empty_block, keep, pack_mask, unpack_mask
from ragcache.kv.block_key import Recipe
from ragcache.kv.cache_shape import CacheShape, LayerShape


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


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
    assert made.equal(block)
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
        assert changed.equal(block)
        changed.parts[part].values[1, 0, 4, 3] += 1
        assert not changed.equal(block)
    assert not block.equal(make_block(1))
    assert not make_block(1).equal(block)


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


def test_each_kind_of_block_takes_the_first_format_that_has_it(codec: Codec, tmp_path: Path) -> None:
    """A version that knows format 1 alone refuses 2 and 3, and reads all else as before."""
    sparse = make_sparse(make_block(1)), make_sparse(make_mixed_block(1))
    for block, version in ((make_block(1), "1"), (make_mixed_block(1), "2"), *((one, "3") for one in sparse)):
        write_block(tmp_path / "block", make_key(1), block, codec.for_trial(block))
        tensors, metadata = read_container(tmp_path / "block")
        assert metadata["format_version"] == version
        write_container(tmp_path / "block", tensors, {**metadata, "format_version": "5"})
        with pytest.raises(SchemaVersionError, match=r"block format 5.*use the version that wrote it"):
            read_block(tmp_path / "block", make_key(1))


def test_every_missing_foreign_or_misshapen_tensor_is_damage(codec: Codec) -> None:
    codec = codec.for_trial(make_mixed_block(1, num_tokens=9))
    tensors = codec.encode(make_mixed_block(1, num_tokens=9))
    part_of = tensors["part_of"]
    changes: list[dict[str, Tensor]] = [
        {**tensors, "more": torch.zeros(1)},
        {**tensors, "0.more": torch.zeros(1)},
        {**tensors, "2.keys": torch.zeros(1)},
    ]
    wrong: list[Callable[[Tensor], Tensor]] = [
        lambda held: held[:-1], lambda held: held[:0], lambda held: held[None], lambda held: held.int(),
        lambda held: held + 1, lambda held: held - 1, lambda held: 1 - held, lambda held: held * 2,
    ]  # fmt: skip
    changes += [{**tensors, "part_of": change(part_of)} for change in wrong]
    for name, tensor in tensors.items():
        changes.append({other: kept for other, kept in tensors.items() if other != name})
        changes.append({**tensors, name: tensor[None]})
    for changed in changes:
        with pytest.raises(DamagedBlockError):
            codec.decode(changed)


@pytest.mark.parametrize("name", sorted(name for name, codec in CODECS.items() if not codec.lossless))
def test_what_cannot_be_kept_is_refused_by_its_layers(name: str, tmp_path: Path) -> None:
    block = make_mixed_block(1)
    codec = get_codec(name).for_trial(block)
    block.parts[1].keys[1, 0, 3, 2] = float("nan")
    with pytest.raises(
        UnencodableBlockError, match=rf"block {make_key(1)} .*layers \[1, 3\] alone, keys of layer 1 hold"
    ):
        write_block(tmp_path / "block", make_key(1), block, codec)
    assert list(tmp_path.iterdir()) == []


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

MAKERS = [make_block, make_mixed_block]


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


@pytest.mark.parametrize("make", MAKERS)
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


@pytest.mark.parametrize("make", MAKERS)
def test_other_tokens_make_another_block(make) -> None:
    block = make(4, num_tokens=20)
    same = [mask.clone() for mask in make_masks(block, 6)]
    assert keep(block, same).equal(keep(block, make_masks(block, 6)))
    assert keep(block, same).map(torch.clone).equal(keep(block, same))
    block = block.map(torch.zeros_like)  # so that the tokens alone differ
    assert not keep(block, same).equal(keep(block, make_masks(block, 6, seed=1)))
    assert not keep(block, same).equal(make(4, num_tokens=6))


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


def test_the_sizes_of_a_plan_are_those_of_the_file() -> None:
    layers = [LayerShape(2, 8, 8)] * 2 + [LayerShape(1, 16, 16)]
    for name in ("raw", "int8", "int4", "fp8", "mikv", "qaq"):
        codec = get_codec(name)
        for alike in (layers[:2], layers):
            encoded = codec.encode(with_first(example_block(alike, 256, torch.float32), 0.25))
            assert codec.expected_bytes(alike, 256, 4, 0.25) == sum(one.nbytes for one in encoded.values()), name


def test_sparse_blocks_are_no_plain_ones() -> None:
    sparse = make_sparse(make_block(1))
    assert isinstance(sparse, MixedBlock)
    assert all(isinstance(part, SparseBlock) for part in sparse.parts)
    assert make_block(1).places(0) is None
    assert isinstance(make_block(1), KVBlock)
    assert set(make_block(1).tokens_by_layer) == {5}
