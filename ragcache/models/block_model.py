"""A model that runs in this process and computes blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Neighbours, Recipe
from ragcache.kv.exact import Exact
from ragcache.models.card import ModelCard

if TYPE_CHECKING:
    from ragcache.models.scheduler import Scheduler


class BlockModel(ModelCard, ABC):
    """A model that runs in this process: as a `LanguageModel`, or inside another engine's library.

    scheduler: the thread that runs the model, and its queue of requests
    """

    scheduler: Scheduler

    @property
    @abstractmethod
    def batch_tokens(self) -> int:
        """Return the number of padded tokens that are encoded together fastest."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of a token's KV."""

    @abstractmethod
    def encode(
        self,
        chunks: Sequence[Sequence[int]],
        recipe: str | Recipe = "isolated",
        prefix_ids: Sequence[int] = (),
        *,
        prefix: Exact | None = None,
        batch_tokens: int | None = None,
        is_needed: Callable[[], bool] | None = None,
        neighbours: Sequence[Neighbours] | None = None,
    ) -> list[KVBlock]:
        """Encode each chunk as `recipe` states and return their blocks, in order; see `LanguageModel.encode`."""

    def read(self, ids: Sequence[int]) -> Exact | None:
        """Return the KV of a text from position 0 on, to be passed to `encode`; None if `encode` keeps it itself."""
        return None

    def finish(self) -> None:
        """Wait until the device has finished its queued work."""
