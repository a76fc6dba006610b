"""QAQ's outliers against NumPy, number by number; what its other bytes stand for is in test_bounds.py."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from blocks import DTYPES
from test_mikv import block_of, important_by_hand, mask_of

from ragcache.codecs import get_codec
from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock

Array = np.ndarray[Any, np.dtype[Any]]
Places = list[tuple[int, int]]
CODEC = get_codec("qaq")


def outliers_by_hand(own: Array, axis: int) -> Places:
    """Token and channel of the hundredth that lies farthest from its channel's mean (axis 0), or its token's (axis 1),
    in deviations. own: [num_tokens, dim] of one head"""
    off = own - own.mean(axis, keepdims=True)
    deviation = np.sqrt((off**2).mean(axis, keepdims=True))
    distance = (np.abs(off) / np.maximum(deviation, 1e-300)).astype(np.float32)
    places = [(token, channel) for token in range(own.shape[0]) for channel in range(own.shape[1])]
    ranked = sorted(places, key=lambda place: -distance[place])
    return sorted(ranked[: math.ceil(0.01 * own.size)])


def clamped_by_hand(own: Array, taken: Places, axis: int) -> Array:
    """Outliers at the nearest end of what their channel or token has without them; 0 where it has nothing."""
    found, gone = own.copy(), set(taken)
    for token, channel in taken:
        line = (
            [(other, channel) for other in range(own.shape[0])]
            if axis == 0
            else [(token, c) for c in range(own.shape[1])]
        )
        others = [own[place] for place in line if place not in gone]
        found[token, channel] = min(max(own[token, channel], min(others)), max(others)) if others else 0.0
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_the_farthest_hundredth_is_exact(dtype: torch.dtype, num_tokens: int) -> None:
    block = block_of(num_tokens, dtype, seed=num_tokens)
    tensors = CODEC.encode(block)
    decoded = CODEC.decode(tensors)
    for part, axis in (("keys", 0), ("values", 1)):
        numbers, restored = getattr(block, part), getattr(decoded, part)
        for layer, head in np.ndindex(*numbers.shape[:2]):
            wanted = outliers_by_hand(numbers[layer, head].double().numpy(), axis)
            held = tensors[f"{part}.outliers"][layer, head].tolist()
            assert [divmod(place, numbers.shape[3]) for place in held] == wanted
            for token, channel in wanted:
                assert restored[layer, head, token, channel] == numbers[layer, head, token, channel]


def test_half_of_the_keys_and_a_fifth_of_the_values_have_four_bits() -> None:
    block = block_of(71, torch.float32)
    tensors, keys = CODEC.encode(block), block.keys.numpy()
    assert (mask_of(tensors, "keys", 71) == important_by_hand(keys, 2)).all()
    assert (mask_of(tensors, "values", 71) == important_by_hand(keys, 5)).all()
    assert tensors["keys.high.codes"].shape[2] == 18  # 36 tokens, two of them in a byte
    assert tensors["keys.low.codes"].shape[2] == 9  # 35, four in a byte
    assert tensors["values.high.codes"].shape[2] == 8  # 15
    assert tensors["values.low.codes"].shape[2] == 14  # 56


def test_an_outlier_costs_the_others_nothing() -> None:
    """One number a thousand times the others: they are restored to the bits that they have without it."""
    block = block_of(64, torch.float32)
    values = block.values.clone()
    values[1, 0, 20, 3] = 1e4
    plain, far = (CODEC.decode(CODEC.encode(KVBlock(block.keys, one))) for one in (block.values, values))
    assert far.values[1, 0, 20, 3] == 1e4
    row = [channel for channel in range(24) if channel != 3]
    scale = block.values[1, 0, 20].abs().max()
    assert (far.values[1, 0, 20, row] - block.values[1, 0, 20, row]).abs().max() < scale
    assert torch.equal(far.keys, plain.keys)


def test_long_passages_have_wider_places() -> None:
    for num_tokens, dtype in ((64, torch.int16), (400, torch.int32)):
        block = KVBlock(torch.randn(1, 1, num_tokens, 128), torch.randn(1, 1, num_tokens, 64))
        tensors = CODEC.encode(block)
        assert tensors["keys.outliers"].dtype == dtype
        assert CODEC.decode(tensors).keys.shape == block.keys.shape


@pytest.mark.parametrize("part", ["keys", "values"])
def test_wrong_outliers_are_damage(part: str) -> None:
    tensors = CODEC.encode(block_of(40, torch.float32))
    places = tensors[f"{part}.outliers"]
    behind, below, twice = places.clone(), places.clone(), places.clone()
    behind[0, 0, -1] = 40 * 24
    below[2, 1, 0] = -1
    twice[1, 1, 1] = twice[1, 1, 0]
    changed = [{f"{part}.outliers": one} for one in (behind, below, twice, places.long(), places[:, :, 1:])]
    changed += [{f"{part}.exact": one} for one in (tensors[f"{part}.exact"].half(), tensors[f"{part}.exact"][:1])]
    for change in changed:
        with pytest.raises(DamagedBlockError):
            CODEC.decode({**tensors, **change})
