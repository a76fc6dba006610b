"""Blocks whose layers differ in heads and widths: every codec keeps every layer, in memory and in a file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blocks import DTYPES, PART_OF, make_block, make_key, make_mixed_block, make_sparse
from safetensors import safe_open
from torch import Tensor

from ragcache.codecs import CODECS, Codec, get_codec
from ragcache.codecs.block_file import codec_of, read_block, write_block
from ragcache.codecs.container import read_container, write_container
from ragcache.errors import DamagedBlockError, SchemaVersionError, UnencodableBlockError
from ragcache.kv.block import KVBlock, MixedBlock, empty_block
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_every_layer_stays_inside_the_bound(codec: Codec, dtype: torch.dtype, num_tokens: int, tmp_path: Path) -> None:
    """Law 6, through memory and through a file; a layer that is copied alone is the same."""
    block = make_mixed_block(num_tokens, num_tokens=num_tokens, dtype=dtype)
    codec = codec.for_trial(block)
    written = write_block(tmp_path / "block", make_key(1), block, codec)
    read = read_block(tmp_path / "block", make_key(1), codec.bases)
    assert read.equal(written)
    assert read.equal(codec.decode(codec.encode(block)))
    assert (read.layers, read.dtype) == (block.layers, dtype)
    bound = codec.error_bound(block)
    assert bound == 0 if codec.lossless else num_tokens == 0 or 0 < bound < 10
    for layer, (keys, values) in enumerate(layers_of(block)):
        for exact, copy in ((keys, read.copy_keys), (values, read.copy_values)):
            out = torch.full(exact.shape, 7.0)
            copy(layer, out)
            assert out.numel() == 0 or float((out.double() - exact.double()).abs().max()) <= bound


def test_what_is_encoded_is_held_encoded_and_written_again_as_it_is(codec: Codec, tmp_path: Path) -> None:
    codec = codec.for_trial(make_mixed_block(1, num_tokens=64))
    held = write_block(tmp_path / "block", make_key(1), make_mixed_block(1, num_tokens=64), codec)
    if not codec.lossless:
        assert held.num_bytes < make_mixed_block(1, num_tokens=64).num_bytes
    again = codec if codec.lossless else codec_of(held)
    assert again.name == codec.name
    write_block(tmp_path / "again", make_key(1), held, again)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "block").read_bytes()


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


def test_damaged_bytes_are_found(codec: Codec, tmp_path: Path) -> None:
    path, rng = tmp_path / "block", random.Random(1)
    write_block(path, make_key(1), make_mixed_block(1), codec.for_trial(make_mixed_block(1)))
    data = path.read_bytes()
    for position in range(0, len(data), 41):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged if position % 2 else damaged[:position])
        with pytest.raises(DamagedBlockError):
            read_block(path, make_key(1))


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
