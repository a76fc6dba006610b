"""KL and agreement at their limits; test_runner.py holds them to NumPy."""

import numpy as np
import pytest
import torch

from ragcache_eval.runner import kl_divergence, top1_agrees


def test_kl_of_the_same_is_zero_and_of_impossible_tokens_counts_nothing():
    logits = torch.tensor([0.0, 1.0, float("-inf")])
    assert kl_divergence(logits, logits).item() == 0.0
    assert kl_divergence(logits, torch.tensor([0.0, 1.0, -5.0])).item() == pytest.approx(
        np.log(np.exp([0.0, 1.0, -5.0]).sum() / np.exp([0.0, 1.0]).sum())
    )


def test_top1():
    a, b = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.0, 9.0], [0.0, 1.0]])
    assert top1_agrees(a, b).tolist() == [True, False]
