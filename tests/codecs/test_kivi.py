"""int8 and int4 against KIVI's formula in NumPy, and fp8 against a table of its numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from blocks import DTYPES

from ragcache.codecs import CODECS, get_codec
from ragcache.codecs.layered import EncodedBlock
from ragcache.kv.block import KVBlock

Array = np.ndarray[Any, np.dtype[Any]]


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
    for got, given, axis, most in (
        (decoded.keys, block.keys, 2, largest[0]),
        (decoded.values, block.values, 3, largest[1]),
    ):
        numbers = given.double().numpy()
        expected, steps = kivi(numbers, axis, most, bits)
        rounded = torch.from_numpy(expected).float().to(dtype).double().numpy()
        ulp = float(torch.finfo(dtype).eps) * np.abs(expected)
        off = np.abs(got.double().numpy() - rounded)
        at_half = np.abs(np.abs(numbers - expected) - steps / 2) <= 1e-3 * steps
        assert np.all((off <= ulp) | (at_half & (off <= steps * 1.001 + ulp)))
        assert np.all(np.abs(got.double().numpy() - numbers) <= steps * 0.5003 + ulp)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_the_nearest_number_of_the_table(dtype: torch.dtype) -> None:
    table = np.array([(-1) ** (b >> 7) * e4m3(b & 127) for b in range(256) if b & 127 != 127])
    block = block_of(40, 24, dtype)
    decoded = get_codec("fp8").decode(get_codec("fp8").encode(block))
    for got, given, axis in ((decoded.keys, block.keys, 2), (decoded.values, block.values, 3)):
        numbers = given.double().numpy()
        scales = np.abs(numbers).max(axis, keepdims=True) / 448
        nearest = np.abs(numbers[..., None] / scales[..., None] - table).min(-1) * scales
        error = np.abs(got.double().numpy() - numbers)
        assert np.all(
            error <= nearest + (float(torch.finfo(dtype).eps) / 2 + 1e-6) * np.abs(numbers) * 17 / 16 + 1e-6 * scales
        )


def e4m3(bits: int) -> float:
    """FP8 Formats for Deep Learning, table 1: bias 7, three bits of fraction, subnormals."""
    exponent, fraction = bits >> 3, bits & 7
    return fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.52), ("int4", 0.29), ("fp8", 0.52)])
@pytest.mark.parametrize("num_tokens", [256, 257, 300, 500])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sizes_against_bfloat16(name: str, limit: float, num_tokens: int, head_dim: int) -> None:
    block = block_of(num_tokens, head_dim, torch.bfloat16)
    encoded = get_codec(name).decode(get_codec(name).encode(block))
    assert isinstance(encoded, EncodedBlock)
    assert encoded.num_bytes <= limit * block.num_bytes


def test_large_numbers_are_kept_in_float16_blocks() -> None:
    """Nothing overflows where the numbers end."""
    numbers = torch.linspace(-65504, 65504, 4096).to(torch.float16).view(1, 1, 64, 64)
    for name in sorted(CODECS):  # the contract's block, at the end of its dtype
        codec = get_codec(name).for_trial(KVBlock(numbers, numbers))
        decoded = codec.decode(codec.encode(KVBlock(numbers, numbers)))
        assert bool(decoded.keys.isfinite().all() and decoded.values.isfinite().all())
