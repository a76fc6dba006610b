"""A CUDA graph's double on the CPU: operations of a pass, recorded, and run again over the same memory.

Of a recorded pass nothing runs again but its operations on tensors: what Python decided, and what it read of a tensor,
stays as it was. Every result goes where the first run's is. What a capture on CUDA does not allow is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragcache.models import graphs
from ragcache.models.graphs import BeforeLayer, Recorded

READS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Tape(TorchDispatchMode):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func is torch.ops.aten.index.Tensor else [torch.empty(0, dtype=torch.bool)]
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if READS & set(func.tags) and by_mask:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._steps:
            for held, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(held, Tensor) and held.data_ptr() != new.data_ptr():
                    held.copy_(new)


class TapeRecorder:
    """Takes the place of CudaRecorder. free: bytes that it says are free, now and after each pass that it records

    runs: parts that ran again, each by what `noted` gave then and the layer before which it ends
    """

    def __init__(self, free: int = 1 << 30, taken: int = 0) -> None:
        self.free, self.taken = free, taken
        self.runs: list[tuple[int, int]] = []
        self.noted: Callable[[], int] = lambda: 0

    def free_bytes(self) -> int:
        return self.free

    def record(self, run: Callable[[BeforeLayer], Tensor], num_layers: int) -> Recorded:
        self.free -= self.taken
        tapes, ends = [Tape()], []

        def before_layer(layer: int) -> None:
            if layer and layer % graphs.PART_LAYERS == 0:
                tapes[-1].__exit__(None, None, None)
                ends.append(layer)
                tapes.append(Tape())
                tapes[-1].__enter__()

        tapes[0].__enter__()
        try:
            out = run(before_layer)
        finally:
            tapes[-1].__exit__(None, None, None)
        return Recorded([self._part(*part) for part in zip([*ends, num_layers], tapes, strict=True)], out)

    def _part(self, end: int, tape: Tape) -> tuple[int, Callable[[], None]]:
        def replay() -> None:
            self.runs.append((self.noted(), end))
            tape.replay()

        return end, replay
