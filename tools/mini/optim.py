"""Optimizers of the mini model.

Muon is momentum whose matrix updates are made orthogonal (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). It trains a small attention model in far fewer steps than Adam, and is used
for the weight matrices inside the layers only; Adam trains embeddings and norms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon:
    """SGD with Nesterov momentum and orthogonal updates; matrices of the same shape are orthogonalised together.

    dtype: of the orthogonalisation
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.dtype = dtype
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self._by_shape[parameter.shape].append(parameter)
        self._momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self._by_shape.items()}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for shape, group in self._by_shape.items():
            gradients = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            self._momenta[shape] = self._momenta[shape].to(gradients.device)
            momenta = self._momenta[shape].lerp_(gradients, 1 - self.momentum)
            updates = orthogonalised(gradients.lerp(momenta, self.momentum).to(self.dtype))
            scale = learning_rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, update in zip(group, updates, strict=True):
                parameter.mul_(1 - learning_rate * self.weight_decay).sub_(update.to(parameter.dtype), alpha=scale)

    def state_dict(self) -> dict[str, Tensor]:
        return {"x".join(map(str, shape)): momenta for shape, momenta in self._momenta.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for shape in self._momenta:
            self._momenta[shape] = state["x".join(map(str, shape))]


class Adam:
    """Adam with bias correction, for embeddings and norms; its state is plain tensors."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], betas: tuple[float, float] = (0.9, 0.98)) -> None:
        self.parameters = list(parameters)
        self.betas = betas
        self._means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._steps = 0

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self._steps += 1
        first, second = self.betas
        correction = (1 - second**self._steps) ** 0.5 / (1 - first**self._steps)
        for parameter, mean, square in zip(self.parameters, self._means, self._squares, strict=True):
            if parameter.grad is not None:
                mean.lerp_(parameter.grad, 1 - first)
                square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                parameter.addcdiv_(mean, square.sqrt().add_(1e-8), value=-learning_rate * correction)

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"mean.{index}": tensor for index, tensor in enumerate(self._means)}
        state |= {f"square.{index}": tensor for index, tensor in enumerate(self._squares)}
        return state | {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._means = [state[f"mean.{index}"].to(p.device) for index, p in enumerate(self.parameters)]
        self._squares = [state[f"square.{index}"].to(p.device) for index, p in enumerate(self.parameters)]
        self._steps = int(state["steps"])


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return `matrices` [n, rows, columns] with singular values near 1 (Newton-Schulz; bfloat16 suffices)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result
