"""PyTorch, imported when it is first used: that takes seconds, and looking into a store needs none of it.

Modules that commands without models import take `torch` from here and types for annotations under TYPE_CHECKING alone;
what stands in a module that imports transformers is imported by the function that calls it. `tests/cli/test_options.py`
holds that.
"""

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
