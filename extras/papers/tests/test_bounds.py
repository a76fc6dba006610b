"""Law 6 against bounds that are computed here, from the numbers and the papers' formulas, without the codecs."""

from typing import Any

import numpy as np
import pytest
import torch
from blocks import DTYPES
from covering import covering

from ragcache.codecs import CODECS, get_codec
from ragcache.kv.block import KVBlock

Array = np.ndarray[Any, np.dtype[Any]]
# Steps and offsets are stored in float16: rounded up by one part in 1,024 at most, or by its smallest step.
HALF, LEAST = 1 + 2.0**-10, 2.0**-24


def groups(length: int, largest: int) -> list[int]:
    """Return the group of each of `length` neighbours: as few groups as possible, of nearly equal size."""
    count = -(-length // largest)
    size = -(-length // count)
    return [place // size for place in range(length)]


def kivi(numbers: Array, axis: int, largest: int, bits: int) -> Array:
    """Return KIVI's bound (section 3): half of (max - min) / (2^bits - 1) of each group. numbers: [tokens, channels]"""
    bounds = np.empty_like(numbers)
    group = np.array(groups(numbers.shape[axis], largest))
    for one in set(group.tolist()):
        index = (group == one, slice(None)) if axis == 0 else (slice(None), group == one)
        part = numbers[index]
        low, high = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
        zero_off = np.abs(low) * 2.0**-10 + LEAST
        step = (high - low + zero_off) / (2**bits - 1) * HALF + LEAST
        bounds[index] = np.broadcast_to(step / 2, part.shape)
    return bounds


def int8(part: str, numbers: Array) -> Array:
    return kivi(numbers, 0, 512, 8) if part == "keys" else kivi(numbers, 1, 128, 8)


def int4(part: str, numbers: Array) -> Array:
    return kivi(numbers, 0 if part == "keys" else 1, 64, 4)


def bfloat16(part: str, numbers: Array) -> Array:
    """Return half of the last of bfloat16's 8 bits."""
    return np.abs(numbers) * 2.0**-8 + 2.0**-134


FORMULAS = {"bfloat16": bfloat16, "int8": int8, "int4": int4}


def bounds(name: str, part: str, block: KVBlock) -> Array:
    """Return each number's bound, before the result is rounded to the block's dtype."""
    tensors = {one: getattr(block, one).double().numpy() for one in ("keys", "values")}
    numbers, found = tensors[part], np.empty(tensors[part].shape)
    for layer, head in np.ndindex(*numbers.shape[:2]):
        found[layer, head] = FORMULAS[name](part, numbers[layer, head])
    return found


def rounding(numbers: Array, error: Array, dtype: torch.dtype) -> Array:
    """Return the error of rounding to the block's dtype, and of the few float32 operations before."""
    steps = torch.finfo(dtype)
    return (np.abs(numbers) + error) * (steps.eps / 2 + 2.0**-20) + steps.smallest_normal * steps.eps


def check(name: str, block: KVBlock) -> None:
    codec = get_codec(name)
    decoded, stated = codec.decode(codec.encode(block)), 0.0
    for part in ("keys", "values"):
        numbers, restored = (getattr(one, part).double().numpy() for one in (block, decoded))
        allowed = bounds(name, part, block)
        assert (np.abs(restored - numbers) <= allowed + rounding(numbers, allowed, block.dtype)).all()
        reach = 3 * np.abs(numbers).max()  # the codec counts the rounding of its grid's largest number
        stated = max(stated, allowed.max() + rounding(reach, 0.0, block.dtype))
    assert codec.error_bound(block) <= 1.01 * stated, "the codec states no more than its formula"


def block_of(num_tokens: int, widths: tuple[int, int], dtype: torch.dtype, seed: int, change: Any) -> KVBlock:
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(3, 2, num_tokens, width, generator=generator) for width in widths]
    return KVBlock(*(change(one).clamp(-60000, 60000).to(dtype) for one in noise))


SHAPES = {
    "normal": lambda noise: noise,
    "heavy": lambda noise: noise**3,
    "far": lambda noise: noise - 50,
    "drifting": lambda noise: noise.cumsum(2),
    "small": lambda noise: noise * 1e-4,
    "large": lambda noise: noise * 9000,
}


@pytest.mark.parametrize(
    ("name", "dtype", "shape"), covering(FORMULAS, DTYPES, SHAPES, together=[(0, 1), (0, 2)]), ids=str
)
def test_every_number_is_within_its_own_groups_bound(name: str, dtype: torch.dtype, shape: str) -> None:
    for num_tokens, widths in ((1, (3, 5)), (70, (24, 130)), (130, (5, 70))):
        check(name, block_of(num_tokens, widths, dtype, num_tokens, SHAPES[shape]))


def test_every_lossy_codec_has_a_formula() -> None:
    exact = {"raw", "samkv"}
    assert {*FORMULAS, *exact, "kvtc"} == set(CODECS), "kvtc has its own in test_kvtc.py"
