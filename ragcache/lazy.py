"""PyTorch, imported when it is first used: that takes seconds, and looking into a store needs none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """Stands in for the module."""

        def __getattr__(self, name: str) -> Any:
            import torch as module

            return getattr(module, name)

    torch = _Torch()
