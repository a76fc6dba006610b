"""What every codec keeps, whatever it does to the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blocks import DTYPES, make_block, make_key

from ragcache.codecs import CODECS, Codec, get_codec
from ragcache.codecs.block_file import read_block, write_block
from ragcache.errors import ConfigError, DamagedBlockError
from ragcache.kv.block import KVBlock


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


def largest_difference(one: KVBlock, other: KVBlock) -> float:
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return max(float((a.double() - b.double()).abs().max()) if a.numel() else 0.0 for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64])
def test_error_stays_inside_its_bound_and_shape_and_dtype_stay(
    codec: Codec, dtype: torch.dtype, num_tokens: int
) -> None:
    block = make_block(num_tokens, num_tokens=num_tokens, dtype=dtype)
    decoded = codec.decode(codec.encode(block))
    assert (decoded.dtype, decoded.keys.shape) == (dtype, block.keys.shape)
    assert decoded.values.shape == block.values.shape
    assert largest_difference(block, decoded) <= codec.error_bound(block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_file_gives_what_the_codec_gives_bit_for_bit(codec: Codec, dtype: torch.dtype, tmp_path: Path) -> None:
    block, key = make_block(1, dtype=dtype), make_key(1)
    written = write_block(tmp_path / "block", key, block, codec)
    assert written.equal(codec.decode(codec.encode(block)))
    assert read_block(tmp_path / "block", key).equal(written)


def test_neither_direction_changes_its_input(codec: Codec) -> None:
    block, same = make_block(2), make_block(2)
    tensors = codec.encode(block)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    codec.decode(tensors)
    assert block.equal(same)
    assert all(torch.equal(tensors[name], copies[name]) for name in copies)


def test_views_of_a_batch_are_encoded_as_their_own_numbers(codec: Codec) -> None:
    batch = torch.randn(2, 2, 20, 4)
    view = batch[:, :, 5:10]
    assert not view.is_contiguous()
    decoded = codec.decode(codec.encode(KVBlock(view, view)))
    assert largest_difference(decoded, KVBlock(view.clone(), view.clone())) <= codec.error_bound(decoded)


def test_wrong_tensors_are_damage(codec: Codec) -> None:
    with pytest.raises(DamagedBlockError):
        codec.decode({"strange": torch.zeros(2)})


def test_raw_keeps_every_bit() -> None:
    """Not-a-number, infinities, negative zero and subnormals too."""
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1, -1, 0x00800000, 0, 0x3F800000], dtype=torch.int32)
    values = bits.view(torch.float32).view(1, 1, 2, 4)
    decoded = get_codec("raw").decode(get_codec("raw").encode(KVBlock(values, values)))
    assert torch.equal(decoded.keys.view(torch.int32).flatten(), bits)


def test_unknown_codec_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'zip'.*raw"):
        get_codec("zip")
