"""The contract of what computes answers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

from ragcache import plugins
from ragcache.engine.answer import Event
from ragcache.engine.prompts import Prompts
from ragcache.engine.request import Request, RequestOptions
from ragcache.fusion.method import FusionMethod
from ragcache.kv.prefix_cache import PrefixStats
from ragcache.models.card import ModelCard
from ragcache.models.scheduler import PassStats
from ragcache.plugins import Registry
from ragcache.store.kv_store import KVStore


class Engine(Protocol):
    """Answers prompts over hits that are already retrieved. Thread-safe.

    `LocalEngine` runs the model in this process; those of `ENGINES` have another engine run it.
    """

    @property
    def prompts(self) -> Prompts: ...

    def check(self, options: RequestOptions) -> None:
        """Raises ConfigError for a question that cannot be read this way."""

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Yield sources, then tokens, then the whole answer."""

    def drop_deleted(self) -> None:
        """Let go of what was computed over passages that are gone."""

    def clear(self) -> None:
        """Let go of everything that is kept between questions."""

    def warm_up(self) -> None:
        """Pay for what the first question would pay for."""

    def prefix_stats(self) -> PrefixStats: ...

    def pass_stats(self) -> PassStats:
        """Counts of the model's passes in this process."""


class Connection(Protocol):
    """Another engine, reached at an address. Nothing is sent before it is request."""

    url: str

    def longest_prompt(self) -> int | None:
        """Tokens of prompt and answer that it takes; None where it does not say. Raises EngineError,
        ModelMismatchError."""

    def reads(self, card: ModelCard, method: FusionMethod) -> bool:
        """Whether it can read stored blocks by this method."""

    def engine(self, card: ModelCard, prompts: Prompts, kv: KVStore) -> Engine:
        """What answers by it, over a store's blocks."""

    def close(self) -> None: ...


ENGINES: Registry[Callable[[str, str, str | None], Connection]] = Registry(plugins.ENGINES)
"""Other engines by the scheme of their addresses; each takes an address, the model's fingerprint and a key, and raises
ConfigError for an address that is none of its own."""
