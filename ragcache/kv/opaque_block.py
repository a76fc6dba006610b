"""Blocks that another engine wrote: bytes that only this engine can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Recipe
from ragcache.kv.cache_shape import LayerShape
from ragcache.lazy_torch import Tensor, torch

DATA, SPAN = "opaque", "span"
"""A stored block's tensors: the bytes, and int64 [3]: `first`, `start` and `stop`."""


class OpaqueBlock(KVBlock):
    """A chunk's KV as an engine saved it. Every codec stores its bytes unchanged.

    data:  uint8 [num_bytes]
    first: position at which the engine read the first token in `data`
    start, stop: the block's tokens within `data`
    """

    def __init__(self, data: Tensor, first: int, start: int, stop: int, recipe: Recipe | None = None) -> None:
        self.data = data
        self.first = first
        self.start = start
        self.stop = stop
        object.__setattr__(self, "recipe", recipe)  # the block's field is frozen

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> OpaqueBlock:
        """Return the block for `tensors`. Raises DamagedBlockError if they are not those of such a block."""
        data, span = tensors[DATA], tensors.get(SPAN)
        if len(tensors) != 2 or data.dtype != torch.uint8 or data.ndim != 1 or span is None or span.shape != (3,):
            raise DamagedBlockError(f"a block of another engine holds bytes and a span, not {sorted(tensors)}")
        first, start, stop = span.tolist()
        if not 0 <= start <= stop or first < 0:
            raise DamagedBlockError(f"a block's span is {span.tolist()}, which no tokens have")
        return cls(data, first, start, stop)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store."""
        return {DATA: self.data, SPAN: torch.tensor([self.first, self.start, self.stop])}

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Return no shapes: only the engine knows them."""
        return ()

    @property
    def num_layers(self) -> int:
        return 0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def stored(self) -> None:
        return None

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        return OpaqueBlock(change(self.data), self.first, self.start, self.stop, self.recipe)

    def part(self, start: int, stop: int) -> OpaqueBlock:
        """Return tokens [start, stop) of the block. The bytes are shared: the engine leaves out the others."""
        return OpaqueBlock(self.data, self.first, self.start + start, self.start + stop, self.recipe)
