"""Blocks whose heads hold some tokens alone: every codec keeps what they hold, and says of which tokens it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blocks import DTYPES, make_block, make_key, make_masks, make_mixed_block, make_sparse, make_unequal, with_first
from covering import covering

from ragcache.codecs import CODECS, Codec, get_codec
from ragcache.codecs.base import example_block
from ragcache.codecs.block_file import codec_of, read_block, write_block
from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock, MixedBlock, SparseBlock, keep, pack_mask, unpack_mask
from ragcache.kv.block_key import Recipe
from ragcache.kv.cache_shape import LayerShape

MAKERS = [make_block, make_mixed_block]


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


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


@pytest.mark.parametrize(
    ("codec", "make", "dtype", "held"),
    covering(
        *(sorted(CODECS), MAKERS, DTYPES, [(5, 0), (5, 1), (70, 33), (130, 64)]),
        together=[(0, 1), (0, 2), (0, 3)],
    ),
    indirect=["codec"],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_what_is_held_stays_inside_the_bound(
    codec: Codec, make, dtype: torch.dtype, held: tuple[int, int], tmp_path: Path
) -> None:
    """Law 6, through memory and through a file; a layer that is copied alone is the same."""
    num_tokens, count = held
    block = make_sparse(make(num_tokens, num_tokens=num_tokens, dtype=dtype), count)
    codec = codec.for_trial(block)
    written = write_block(tmp_path / "block", make_key(1), block, codec)
    read = read_block(tmp_path / "block", make_key(1), codec.bases)
    assert read.equal(written)
    assert read.equal(codec.decode(codec.encode(block)))
    assert (read.num_tokens, read.dtype, read.layers) == (num_tokens, dtype, block.layers)
    assert set(read.tokens_by_layer) == {count}
    bound = codec.error_bound(block)
    for layer in range(block.num_layers):
        places, wanted = read.places(layer), block.places(layer)
        assert places is not None
        assert wanted is not None
        assert torch.equal(places, wanted)
        for exact, copy in ((block.layer_keys(layer), read.copy_keys), (block.layer_values(layer), read.copy_values)):
            out = torch.full(exact.shape, 7.0)
            copy(layer, out)
            assert out.numel() == 0 or float((out.double() - exact.double()).abs().max()) <= bound
    if codec.lossless:
        assert read.equal(block)


@pytest.mark.parametrize("make", MAKERS)
def test_layers_may_hold_unequally_many(codec: Codec, make, tmp_path: Path) -> None:
    block = make_unequal(make(5, num_tokens=70))
    assert len(set(block.tokens_by_layer)) == block.num_layers
    assert block.tokens_by_layer[0] == 0
    assert block.tokens_by_layer[-1] == 70
    codec = codec.for_trial(block)
    written = write_block(tmp_path / "block", make_key(1), block, codec)
    read = read_block(tmp_path / "block", make_key(1), codec.bases)
    assert read.equal(written)
    assert read.tokens_by_layer == block.tokens_by_layer
    bound = codec.error_bound(block)
    for layer in range(block.num_layers):
        places, wanted = read.places(layer), block.places(layer)
        assert (places is None) == (wanted is None)
        assert places is None or wanted is None or torch.equal(places, wanted)
        for exact, copy in ((block.layer_keys(layer), read.layer_keys), (block.layer_values(layer), read.layer_values)):
            assert exact.numel() == 0 or float((copy(layer).double() - exact.double()).abs().max()) <= bound
    assert codec.lossless <= read.equal(block)


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_encoded_is_held_encoded_and_written_again_as_it_is(codec: Codec, make, tmp_path: Path) -> None:
    block = make_sparse(make(1, num_tokens=64), 32)
    codec = codec.for_trial(block)
    held = write_block(tmp_path / "block", make_key(1), block, codec)
    again = codec if codec.lossless else codec_of(held)
    assert again.name == codec.name
    write_block(tmp_path / "again", make_key(1), held, again)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "block").read_bytes()


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
