"""Mixed precision against its description in NumPy: which tokens are important, and what their bytes stand for."""

from typing import Any

import numpy as np
import pytest
import torch
from blocks import DTYPES

from ragcache.codecs import get_codec
from ragcache.codecs.layered import EncodedBlock
from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock

Array = np.ndarray[Any, np.dtype[Any]]
CODEC = get_codec("mikv")
SHAPE = (3, 2)


def block_of(num_tokens: int, dtype: torch.dtype, width: int = 24, seed: int = 0) -> KVBlock:
    """Keys around a direction that most tokens of a head share."""
    rng = np.random.default_rng(seed)
    keys, values = (rng.standard_normal((*SHAPE, num_tokens, width)) for _ in range(2))
    keys += 3 * rng.standard_normal((*SHAPE, 1, width))
    return KVBlock(*(torch.from_numpy(one).to(dtype) for one in (keys, values)))


def wanted_number(num_tokens: int, one_in: int = 5) -> int:
    """A fifth, rounded up, and four where there are so many."""
    return min(num_tokens, max(4, (num_tokens + one_in - 1) // one_in))


def important_by_hand(keys: Array, one_in: int = 5) -> Array:
    """KeyDiff: cosine of each key and the mean of its head's directions; the least alike, the first four always."""
    mask = np.zeros(keys.shape[:3], dtype=bool)
    for layer, head in np.ndindex(*keys.shape[:2]):
        own = keys[layer, head].astype(np.float64)
        directions = own / np.linalg.norm(own, axis=1, keepdims=True)
        mean = directions.mean(0)
        likeness = [np.float32(one @ mean / np.linalg.norm(mean)) for one in directions]
        ranked = sorted(range(len(own)), key=lambda token: (token >= 4, likeness[token]))
        mask[layer, head, ranked[: wanted_number(len(own), one_in)]] = True
    return mask


def mask_of(tensors: dict[str, torch.Tensor], part: str, num_tokens: int) -> Array:
    bits = np.unpackbits(tensors[f"{part}.important"].numpy(), axis=2, bitorder="little")
    assert not bits[:, :, num_tokens:].any()
    return bits[:, :, :num_tokens].astype(bool)


def codes_by_hand(packed: Array, bits: int, num_tokens: int) -> Array:
    """One code at a time: token t of n stands in row t % rows, the (t // rows)th from the lowest bits."""
    codes = np.empty((num_tokens, packed.shape[1]), dtype=np.int64)
    for token in range(num_tokens):
        codes[token] = packed[token % len(packed)] >> (bits * (token // len(packed))) & (2**bits - 1)
    return codes


def groups(length: int, largest: int) -> list[int]:
    """The group of each of `length` neighbours: as few groups as there can be, of like size."""
    count = -(-length // largest)
    size = -(-length // count)
    return [place // size for place in range(length)]


def decoded_by_hand(tensors: dict[str, torch.Tensor], part: str, shape: tuple[int, ...]) -> Array:
    own = {name.removeprefix(f"{part}."): one.numpy() for name, one in tensors.items() if name.startswith(part)}
    mask, found = mask_of(tensors, part, shape[2]), np.empty(shape)
    for layer, head in np.ndindex(*shape[:2]):
        for precision, bits, largest, chosen in (
            ("high", 8, {"keys": 512, "values": 128}[part], mask[layer, head]),
            ("low", 2, 32, ~mask[layer, head]),
        ):
            tokens = np.flatnonzero(chosen)
            if not len(tokens):
                continue
            packed, scales, zeros = (
                own[f"{precision}.{name}"][layer, head] for name in ("codes", "scales", "zeros")
            )  # fmt: skip
            codes = codes_by_hand(packed, bits, len(tokens)).astype(np.float64)
            along = groups(codes.shape[0 if part == "keys" else 1], largest)
            scale, zero = (
                one.astype(np.float64)[along] if part == "keys" else one.astype(np.float64)[:, along]
                for one in (scales, zeros)
            )
            found[layer, head, tokens] = codes * scale + zero
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 5), (4, 8), (6, 7), (37, 33), (200, 64)])
def test_what_is_decoded_is_the_formula_on_the_bytes(dtype: torch.dtype, num_tokens: int, width: int) -> None:
    block = block_of(num_tokens, dtype, width)
    tensors = CODEC.encode(block)
    decoded = CODEC.decode(tensors)
    for part, got in (("keys", decoded.keys), ("values", decoded.values)):
        expected = decoded_by_hand(tensors, part, tuple(got.shape))
        off = np.abs(got.double().numpy() - expected)
        assert np.all(off <= (float(torch.finfo(dtype).eps) / 2 + 2.0**-22) * np.abs(expected) + 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 19, 20, 21, 137])
def test_a_fifth_of_each_heads_tokens_is_important_by_keydiff(num_tokens: int) -> None:
    block = block_of(num_tokens, torch.float32)
    tensors = CODEC.encode(block)
    expected = important_by_hand(block.keys.numpy())
    assert np.all(expected.sum(2) == wanted_number(num_tokens))
    for part in ("keys", "values"):  # one choice for both: what is looked at is read
        assert np.array_equal(mask_of(tensors, part, num_tokens), expected)


def test_keys_that_stand_out_are_kept_precisely_and_nothing_is_lost() -> None:
    """Far from the others' direction: 8 bits. All others are there, too, within the stated bound."""
    block = block_of(60, torch.float32)
    outstanding = [7, 30, 31, 59]
    block.keys[:, :, outstanding] *= -1
    decoded = CODEC.decode(CODEC.encode(block))
    error = (decoded.values - block.values).abs().amax(3)
    spread = block.values.amax(3) - block.values.amin(3)
    kept = [*range(4), *outstanding]
    others = [token for token in range(60) if token not in kept]
    assert bool((error[:, :, kept] <= spread[:, :, kept] / 255 * 0.51).all())
    assert bool((error[:, :, others] <= spread[:, :, others] / 3 * 0.51).all())
    assert float(error[:, :, others].mean()) > 10 * float(error[:, :, kept].mean())


def test_the_choice_does_not_depend_on_how_large_keys_are_or_on_values() -> None:
    one, other = block_of(50, torch.float32), block_of(50, torch.float32)
    other.keys.mul_(torch.rand(*SHAPE, 50, 1) * 8 + 0.1)
    other.values.zero_()
    masks = [mask_of(CODEC.encode(block), "keys", 50) for block in (one, other)]
    assert np.mean(masks[0] == masks[1]) > 0.95  # float32 keys: those that are alike but for rounding may change places


@pytest.mark.parametrize("num_tokens", [256, 257, 300, 500])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sizes_against_bfloat16(num_tokens: int, head_dim: int) -> None:
    """Stay below int4's 0.29: 8.5 bits and 3, scales and zero points too, for a fifth and four fifths of the tokens."""
    block = block_of(num_tokens, torch.bfloat16, head_dim)
    encoded = CODEC.decode(CODEC.encode(block))
    assert isinstance(encoded, EncodedBlock)
    assert encoded.num_bytes <= 0.27 * block.num_bytes


@pytest.mark.parametrize("change", ["one more", "one less", "beyond the end", "moved"])
def test_a_choice_that_does_not_fit_is_damage(change: str) -> None:
    tensors = CODEC.encode(block_of(37, torch.float32))
    bits = np.unpackbits(tensors["values.important"].numpy(), axis=2, bitorder="little")
    first, absent = np.flatnonzero(bits[1, 1])[-1], np.flatnonzero(bits[1, 1, :37] == 0)[0]
    bits[1, 1, first] = change not in ("one less", "moved", "beyond the end")
    bits[1, 1, absent if change != "beyond the end" else 38] = change != "one less"
    tensors["values.important"] = torch.from_numpy(np.packbits(bits, axis=2, bitorder="little"))
    if change == "moved":  # as many as there should be: only the checksum can tell
        CODEC.decode(tensors)
        return
    with pytest.raises(DamagedBlockError, match="important tokens"):
        CODEC.decode(tensors)
