"""The tier in host memory, under a byte budget."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable

from ragcache.errors import first_line
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import Tensor, torch
from ragcache.store.tiers.budgeted import BudgetedRoom, BudgetedTier
from ragcache.store.tiers.tier import DurableTier


class MemoryTier(BudgetedTier):
    """A tier in host memory.

    page_locked: new copies are in page-locked memory, which a CUDA device reads directly, while the system grants it
    """

    name = "memory"
    page_locked: bool = False

    def on_device(self, device: torch.device) -> None:
        self.page_locked = self.page_locked or device.type == "cuda"

    def taken(self, num_bytes: int) -> int:
        """Return the bytes of memory that a tensor of num_bytes occupies.

        In page-locked memory PyTorch's allocator rounds them up to a power of two.
        """
        return 1 << (num_bytes - 1).bit_length() if self.page_locked and num_bytes else num_bytes

    def read(self, key: str, tier: DurableTier) -> KVBlock | None:
        """Read a block of `tier` directly into this tier's memory if it has room; otherwise read it, then `put` it."""
        with BudgetedRoom(self, key) as room:
            block = tier.get(key, room)
            if block is not None and room.buffer is not None and _lies_in(block, room.buffer):
                return room.hold(block)
        return None if block is None else self.put(key, block) or block

    def _made(self, make: Callable[..., Tensor]) -> Tensor:
        if not self.page_locked:
            return make()
        try:
            return make(pin_memory=True)
        except RuntimeError as error:
            with self._lock:
                is_first, self.page_locked = self.page_locked, False
            if is_first:
                limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                log.warning(
                    "the system page-locks no more memory (%s; limit: %s): further KV blocks are in ordinary memory, "
                    "which a GPU reads more slowly; raise the limit (ulimit -l unlimited, docker run --ulimit "
                    "memlock=-1), or give --memory less",
                    first_line(error), "none" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes",
                )  # fmt: skip
            return make()


def _lies_in(block: KVBlock, buffer: Tensor) -> bool:
    """Return whether all of the block's tensors lie in the buffer."""
    own = buffer.untyped_storage().data_ptr()
    return all(tensor.untyped_storage().data_ptr() == own for tensor in block.held_tensors() if tensor.numel())


log = logging.getLogger(__name__)
