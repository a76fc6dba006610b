"""Bounds that lossy codecs state: no larger than the papers' formulas, computed here without the codecs.

That no number is further off than its own group's step is in tests/codecs/test_codec_contract.py.
"""

import pytest
import torch
from blocks import DTYPES
from torch import Tensor

from ragcache.codecs import CODECS, get_codec
from ragcache.kv.block import KVBlock

TOKENS = CHANNELS = 128
SHAPES = {
    "normal": lambda noise: noise,
    "heavy": lambda noise: noise**3,
    "far": lambda noise: noise - 50,
    "drifting": lambda noise: noise.cumsum(2),
    "small": lambda noise: noise * 1e-4,
    "large": lambda noise: noise * 9000,
}


def half_step(numbers: Tensor, axis: int, size: int, bits: int) -> float:
    """Return KIVI's bound (section 3): half of (max - min) / (2^bits - 1) in the widest group, steps in float16."""
    groups = numbers.double().unflatten(axis, (-1, size))
    low, high = groups.amin(axis + 1), groups.amax(axis + 1)
    offset = low.abs() * 2.0**-10 + 2.0**-24  # the least number is rounded down
    return float(((high - low + offset) / (2**bits - 1) * (1 + 2.0**-10)).max()) / 2 + 2.0**-25


def stated(name: str, block: KVBlock) -> float:
    if name == "bfloat16":
        return max(float(numbers.abs().max()) for numbers in (block.keys, block.values)) * 2.0**-8 + 2.0**-134
    bits, of_tokens, of_channels = (8, TOKENS, CHANNELS) if name == "int8" else (4, 64, 64)
    return max(half_step(block.keys, 2, of_tokens, bits), half_step(block.values, 3, of_channels, bits))


LOSSY = ["bfloat16", "int8", "int4"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_a_codec_states_no_more_than_its_formula(name: str, dtype: torch.dtype) -> None:
    codec, noise = get_codec(name), torch.randn(2, 3, 2, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1))
    for shape, change in SHAPES.items():
        block = KVBlock(*(change(one).clamp(-60000, 60000).to(dtype) for one in noise))
        # The codec counts the rounding of its grid's largest number to the block's dtype.
        largest, steps = max(float(one.abs().max()) for one in (block.keys, block.values)), torch.finfo(dtype)
        rounding = 3 * largest * (steps.eps / 2 + 2.0**-20) + steps.smallest_normal * steps.eps
        assert codec.error_bound(block) <= 1.01 * (stated(name, block) + rounding), shape


def test_every_lossy_codec_has_a_formula() -> None:
    assert {*LOSSY, "raw", "samkv", "kvtc"} == set(CODECS), "kvtc has its own in test_kvtc.py"
