"""Layers compiled for training on a GPU: one's hundred and more small operations become a few kernels.

Attention stays as it is (FlexAttention is compiled by itself), and so does what stands around the layers, whose shapes
differ from batch to batch. A batch's length does not (`collate`), so that a run compiles once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

logger = logging.getLogger(__name__)

BOUND = 0.05
"""How far loss and gradients' norm of a first batch may be, relative: bfloat16 is rounded at other places."""


def compile_layers(
    model: nn.Module, trained: Sequence[nn.Parameter], loss: Callable[[], Tensor], backend: str = "inductor"
) -> bool:
    """Compile the model's layers, unless that fails or changes what is computed; which is logged then. Returns whether
    they are.

    trained: parameters; loss: of one batch, which is computed and differentiated twice. The gradients are dropped
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    plain = _measure(loss, trained)
    for layer in layers:  # of one code, which is compiled once
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
    try:
        compiled = _measure(loss, trained)
        if all(math.isclose(*pair, rel_tol=BOUND) for pair in zip(plain, compiled, strict=True)):
            return True
        reason = "loss {:.4g} and gradients {:.4g} become {:.4g} and {:.4g}".format(*plain, *compiled)
    except RuntimeError as error:  # what torch.compile raises is one, whatever the compiler lacks
        reason = " ".join(str(error).split())[:200]
    for layer in layers:
        del layer.forward
    logger.warning("layers cannot be compiled (%s); training goes on without, more slowly", reason)
    return False


def _measure(loss: Callable[[], Tensor], trained: Sequence[nn.Parameter]) -> tuple[float, float]:
    """The loss, and the norm of its gradients, which are dropped."""
    found = loss()
    found.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([one.grad for one in trained if one.grad is not None])
    for one in trained:
        one.grad = None
    return found.item(), norm.item()
