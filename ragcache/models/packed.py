"""Linear layers whose weights are packed once for oneDNN, with which PyTorch multiplies matrices on a CPU.

A plain linear layer packs its weights in every call, or multiplies a few rows with a slow kernel. With weights packed
once, measured for all linear layers of the 135M shape on two busy cores: one row takes 40 ms instead of 59 (bfloat16);
eight rows 38 instead of 50 (bfloat16) and 73 instead of 96 (float32); a question of 30 rows 55 instead of 65 and 103
instead of 146. The copies take as much memory as the weights themselves, which are still needed elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ragcache.models.machine import machine_bytes

# Unless the user decides: packed weights may take 1 / DEFAULT_SHARE of the machine's memory.
DEFAULT_SHARE = 8
# Numbers of rows in float32 that packed weights multiply faster. Outside, 512 rows take 890 ms instead of 768, one row
# 47 instead of 33.
FLOAT32_ROWS = range(4, 129)


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight, which must not be changed afterwards.

    A copy of the layer, and a layer with gradients enabled, multiplies by the weight itself.
    """

    _packed: Tensor | None = None

    @classmethod
    def take_over(cls, linear: nn.Linear) -> None:
        """Turn a plain linear layer into a packed layer, which keeps its parameters."""
        linear.__class__ = cls
        linear._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        suits = rows in FLOAT32_ROWS if input.dtype == torch.float32 else rows > 0
        if self._packed is None or not suits or torch.is_grad_enabled():
            return super().forward(input)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


def can_pack(model: nn.Module) -> bool:
    """Return whether PyTorch can multiply by packed weights here, in the model's dtype."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack(model: nn.Module, packed: bool | None = None) -> int:
    """Pack the weights of all linear layers, if possible, and return the bytes that the copies take.

    packed: False: pack nothing; None: pack only if the copies take at most an eighth of the machine's memory
    """
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter]
    num_bytes = sum(layer.weight.nbytes for layer in layers)
    if packed is None:
        packed = num_bytes <= machine_bytes() // DEFAULT_SHARE
    if not packed or not can_pack(model):
        return 0
    for layer in layers:
        PackedLinear.take_over(layer)
    return num_bytes
