"""PyTorch, imported at its first use: the import takes seconds, and inspecting a store does not need it.

Modules used by commands without models import `torch` from here, and `Tensor`, which is for annotations alone; other
types for annotations they import only under TYPE_CHECKING.
Anything from a module that imports transformers is imported by the function that calls it. `tests/cli/test_options.py`
checks this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        """A placeholder for the module."""

        def __getattr__(self, name: str) -> Any:
            import torch as module

            return getattr(module, name)

    torch = _Torch()
    Tensor = Any
