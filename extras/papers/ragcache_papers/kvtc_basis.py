"""KVTC's bases (arXiv 2511.01815): transforms that are fitted to a store's own passages.

A basis is a block whose tokens are the rows of a transform.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.lazy_torch import Tensor
from ragcache_papers.kvtc_transform import Group, groups_of

# Unpacked codes that are kept for the next layer: a prompt's passages are read layer by layer.
RECENT_BYTES = 64 << 20


class Basis:
    """The groups of a basis. Raises DamagedBlockError if the block is not a basis.

    recent: codes of the blocks that were decoded last
    """

    def __init__(self, block: KVBlock) -> None:
        self.recent = Recent(RECENT_BYTES)
        self._groups: dict[tuple[int, str, int, int, int], tuple[Group, ...]] = {}
        for number, part in enumerate(_parts(block)):
            for kind, rows in (("keys", part.keys), ("values", part.values)):
                layers, heads, _, width = rows.shape
                self._groups[number, kind, layers, heads, width] = groups_of(rows)

    def groups(self, number: int, part: str, shape: tuple[int, ...]) -> tuple[Group, ...] | None:
        """Return the groups of keys or values of this shape; None if the basis was made from other layers.

        number: of the part, in blocks whose layers differ; shape: [num_layers, num_kv_heads, num_tokens, head_dim]
        """
        layers, heads, _, width = shape
        return self._groups.get((number, part, layers, heads, width))


class Recent:
    """The codes unpacked last, `budget_bytes` at most: the layers of a group are restored one after another from the
    same codes.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held: OrderedDict[tuple[int, int], tuple[weakref.ref[Tensor], Tensor]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, stream: Tensor, group: int, unpack: Callable[[], Tensor]) -> Tensor:
        """Return the codes of a group of the block with this stream; `unpack` makes them if they are not held."""
        key = id(stream), group
        with self._lock:
            found = self._held.get(key)
            if found is not None and found[0]() is stream:
                self._held.move_to_end(key)
                return found[1]
        codes = unpack()
        with self._lock:
            if key in self._held:
                self._num_bytes -= self._held.pop(key)[1].nbytes
            self._held[key] = weakref.ref(stream), codes
            self._num_bytes += codes.nbytes
            while self._num_bytes > self._budget_bytes:
                self._num_bytes -= self._held.popitem(last=False)[1][1].nbytes
        return codes


def _parts(block: KVBlock) -> tuple[KVBlock, ...]:
    return block.parts if isinstance(block, MixedBlock) else (block,)
