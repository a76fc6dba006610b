"""Maps of recurrent states in int8, against NumPy in float64."""

import numpy as np
import pytest
import torch

from ragcache.kv.state import StateMap

HEADS, ROWS, COLUMNS = 2, 5, 7


@pytest.mark.parametrize("width", [1, ROWS])
def test_a_rounded_map_changes_a_state_as_the_map_does(width):
    """S becomes P S + Q. P and Q are off by half a step of their row at most; one number a head stays as it is."""
    p, q, state = (
        torch.rand(HEADS, width, width),
        torch.randn(HEADS, ROWS, COLUMNS),
        torch.rand(1, HEADS, ROWS, COLUMNS),
    )
    rounded = StateMap(p, q, torch.zeros(3, 4)).rounded()
    assert rounded.q.dtype == torch.int8
    assert (rounded.p.dtype == torch.int8) == (width > 1)

    by_number = p.double().numpy(), q.double().numpy(), state.double().numpy()
    right = by_number[0] @ by_number[2] + by_number[1] if width > 1 else by_number[0] * by_number[2] + by_number[1]
    steps_p = by_number[0].max(-1, keepdims=True) / 127 if width > 1 else np.zeros((HEADS, 1, 1))
    steps_q = np.abs(by_number[1]).max(-1, keepdims=True) / 127
    bound = 0.501 * (steps_p * by_number[2].sum(-2, keepdims=True) + steps_q) + 1e-6
    off = np.abs(rounded.advance(state).double().numpy() - right)
    assert (off <= bound).all()
    assert off.max() > 0
    assert (np.abs(rounded.advance(None).double().numpy() - by_number[1]) <= 0.501 * steps_q + 1e-6).all()
