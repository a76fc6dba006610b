"""Rotation against RoFormer's equation 15 in NumPy and float64, beyond the first table of angles."""

import numpy as np
import pytest
import torch
from families import LLAMA3, SMALL, YARN
from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM

import ragcache as rc

WIDTH = 12  # of a head
POSITIONS = [0, 1, 1022, 1023, 1024, 1025, 2047, 2048, 2049, 3500]
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def llama(directory, rope=PLAIN):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMALL, "max_position_embeddings": 4096, "rope_parameters": dict(rope)})
    LlamaForCausalLM(config).save_pretrained(directory)
    return rc.load_lm(directory)


def frequencies(rope):
    """Frequencies of each pair of dimensions, and the factor of cos and sin."""
    base = rope["rope_theta"] ** (-np.arange(0, WIDTH, 2) / WIDTH)
    if rope["rope_type"] == "linear":
        return base / rope["factor"], 1.0
    if rope["rope_type"] == "llama3":  # short waves stay, long ones are stretched, those between are blended
        turns = rope["original_max_position_embeddings"] * base / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - share) * base / rope["factor"] + share * base, 1.0
    if rope["rope_type"] == "yarn":  # blended by dimension, between those of 32 turns and of one (2309.00071, 3.2)
        length, log = rope["original_max_position_embeddings"], np.log(rope["rope_theta"])
        low, high = (WIDTH * np.log(length / (turns * 2 * np.pi)) / (2 * log) for turns in (32, 1))
        low, high = max(np.floor(low), 0), min(np.ceil(high), WIDTH - 1)
        share = 1 - np.clip((np.arange(WIDTH // 2) - low) / (high - low), 0, 1)
        return (1 - share) * base / rope["factor"] + share * base, 0.1 * np.log(rope["factor"]) + 1
    return base, 1.0


def rotated(keys, positions, rope):
    """keys: [heads, tokens, WIDTH]; dimension d turns with d + WIDTH / 2."""
    keys = keys.double().numpy()
    by_pair, factor = frequencies(rope)
    angles = np.array(positions, dtype=np.float64)[:, None] * by_pair
    first, second = keys[..., : WIDTH // 2], keys[..., WIDTH // 2 :]
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize(
    "rope", [PLAIN, {**PLAIN, "rope_type": "linear", "factor": 3.0}, LLAMA3, YARN], ids=lambda rope: rope["rope_type"]
)
def test_any_position_whatever_was_asked_before(tmp_path, rope):
    """One more than before, as decoding asks; beyond what was computed so far; scattered, and in a row across an
    edge."""
    turn = llama(tmp_path, rope).rope
    keys = torch.randn(2, len(POSITIONS), WIDTH, generator=torch.Generator().manual_seed(1))
    for position in range(1022, 1027):
        found = turn.rotate(keys[:, :1], 2, position).numpy()
        np.testing.assert_allclose(found, rotated(keys[:, :1], [position], rope), atol=3e-3)
    for positions in ([5] * len(POSITIONS), POSITIONS, POSITIONS[::-1]):
        found = turn.rotate(keys, 1, torch.tensor(positions))
        np.testing.assert_allclose(found.numpy(), rotated(keys, positions, rope), atol=3e-3)
    for start in (0, 1019, 2043, 4000):
        row = list(range(start, start + len(POSITIONS)))
        np.testing.assert_allclose(turn.rotate(keys, 0, start).numpy(), rotated(keys, row, rope), atol=3e-3)


def test_dimensions_that_do_not_turn_are_copied_by_the_fast_way(tmp_path):
    """Half of Phi's dimensions stay. Where the fast way leaves them out, the family's own function rotates instead."""
    torch.manual_seed(0)
    rope = {**PLAIN, "partial_rotary_factor": 0.5}
    config = PhiConfig(**{**SMALL, "rope_parameters": rope})
    PhiForCausalLM(config).save_pretrained(tmp_path)
    lm = rc.load_lm(tmp_path)
    width = lm.shape.layers[0][1]
    turning = width // 2
    keys, positions = torch.randn(2, 3, width), torch.tensor([1, 5, 9])
    angles = lm.rope.angles(0, positions)
    assert angles.half == turning // 2
    out = lm.rope.rotate(keys, 0, positions, out=torch.full_like(keys, torch.nan))
    base = PLAIN["rope_theta"] ** (-np.arange(0, turning, 2) / turning)
    by_token = positions.numpy()[:, None] * base
    cos, sin, given = np.cos(by_token), np.sin(by_token), keys.double().numpy()
    first, second = given[..., : turning // 2], given[..., turning // 2 : turning]
    right = np.concatenate([first * cos - second * sin, second * cos + first * sin, given[..., turning:]], -1)
    np.testing.assert_allclose(out.double().numpy(), right, atol=1e-5)
