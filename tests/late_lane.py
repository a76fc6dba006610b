"""A CUDA stream's double for tests of waits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class LateLane:
    """A lane whose work is there only for who waits for it: until then what it wrote is NaN."""

    def __init__(self) -> None:
        self.waited = 0

    def follow(self) -> None: ...

    def drop_done(self) -> None: ...

    def share(self, tensor: Tensor) -> None: ...

    def written_by(self, held: object) -> Sequence[Tensor]:
        """Return the tensors that work may write to."""
        buffers = held[1].buffers
        return (*buffers.keys, *buffers.values)

    def run(self, work: Callable[[], None], held: object) -> Callable[[], None]:
        tensors = self.written_by(held)
        before = [tensor.clone() for tensor in tensors]
        work()
        after = [tensor.clone() for tensor in tensors]
        written = [(one != two) & ~(one.isnan() & two.isnan()) for one, two in zip(before, after, strict=True)]
        for tensor, mask in zip(tensors, written, strict=True):
            tensor[mask] = torch.nan

        def wait() -> None:
            self.waited += 1
            for tensor, mask, then in zip(tensors, written, after, strict=True):
                tensor[mask] = then[mask]

        return wait
