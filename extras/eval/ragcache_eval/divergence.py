"""How far a distribution over the next token is from another."""

from __future__ import annotations

from torch import Tensor


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """Return KL(reference || other) in nats as float64 [...]. Both are logits [..., vocab_size]."""
    p = reference.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    # Where p has no mass at all, exp(p) * (p - q) is 0 * inf.
    return (p.exp() * (p - q)).where(p.exp() > 0, 0.0).sum(-1).clamp_min(0.0)


def top1_agrees(reference: Tensor, other: Tensor) -> Tensor:
    """Return, as bool [...], whether both would choose the same token."""
    return reference.argmax(-1) == other.argmax(-1)
