"""Blocks of models with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.kv.block_key import Recipe
from ragcache.kv.state import StateMap
from ragcache.lazy_torch import Tensor


class HybridBlock(MixedBlock):
    """A block of a model with recurrent layers.

    kv:     keys and values of the other layers
    states: maps of the recurrent layers, in the model's order
    """

    def __init__(self, kv: KVBlock, states: Sequence[StateMap], recipe: Recipe | None = None) -> None:
        super().__init__([kv], [0] * kv.num_layers, recipe)
        self.kv = kv
        self._states = tuple(states)

    @property
    def states(self) -> tuple[StateMap, ...]:
        return self._states

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(state.num_bytes for state in self.states)

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        return HybridBlock(self.kv.map(change), [state.map(change) for state in self.states], self.recipe)
