"""The interface of engines, which compute answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol

from ragcache import plugins
from ragcache.engine.answer import Event
from ragcache.engine.caches.prefix_cache import PrefixStats
from ragcache.engine.estimate import PrefillEstimate
from ragcache.engine.loader import BlockLoader
from ragcache.engine.prompts import Prompts
from ragcache.engine.request import Request, RequestOptions
from ragcache.fusion.fuse import FuseOutput, PromptPlan
from ragcache.fusion.layout import Layout
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.kv.fused_cache import FusedCache
from ragcache.lazy_torch import Tensor
from ragcache.models.block_model import BlockModel
from ragcache.models.card import ModelCard
from ragcache.models.scheduler import PassStats
from ragcache.plugins import Registry
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore


class Engine(Protocol):
    """Answers prompts over retrieved hits. Thread-safe.

    `LocalEngine` runs the model in this process; the engines in `ENGINES` forward prompts to another engine.
    """

    @property
    def prompts(self) -> Prompts: ...

    def of(self, salt: str) -> Engine:
        """Return the engine for questions whose KV has another salt."""

    def check(self, options: RequestOptions) -> None:
        """Raise ConfigError if a question cannot be read with these options."""

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Yield sources, then tokens, then the whole answer."""

    def clear(self) -> None:
        """Drop everything that is kept between questions."""

    def warm_up(self) -> None:
        """Prepare for the first question, so that it does not wait for one-time work."""

    def prefix_stats(self) -> PrefixStats: ...

    def pass_stats(self) -> PassStats:
        """Return counts of the model's passes in this process."""


class Connection(Protocol):
    """Another engine, reached at an address. Nothing is sent before the first request."""

    url: str

    def longest_prompt(self) -> int | None:
        """Return the most tokens of prompt and answer that the engine takes, or None if it does not say.

        Raises EngineError, ModelMismatchError.
        """

    def reads(self, card: ModelCard, method: FusionMethod) -> bool:
        """Return whether the engine can read stored blocks by this method."""

    def engine(self, card: ModelCard, prompts: Prompts, kv: KVStore) -> Engine:
        """Return an Engine that answers through this connection, over a store's blocks."""

    def close(self) -> None: ...


class EmbeddedModel(BlockModel):
    """A model that another engine's library runs in this process.

    weights: digest of the model alone, without the engine's build and settings; a store is bound to it
    """

    weights: str

    @abstractmethod
    def reads(self, card: ModelCard, method: FusionMethod) -> bool:
        """Return whether the engine can read stored blocks by this method."""

    @abstractmethod
    def engine(
        self,
        prompts: Prompts,
        encoder: ModelEncoder,
        documents: DocumentStore,
        loader: BlockLoader,
        estimate: PrefillEstimate,
    ) -> Engine:
        """Return an Engine that answers by this model.

        encoder, loader: compute and load the store's blocks
        estimate: learns from full reads
        """

    @abstractmethod
    def check_method(self, method: FusionMethod) -> None:
        """Raise ConfigError if the engine cannot read prompts by this method."""

    @abstractmethod
    def prefill(self, plan: PromptPlan, blocks: Sequence[KVBlock], reserve_tokens: int) -> FuseOutput:
        """Read a prompt as `rc.fuse` does.

        blocks:         a block for each passage that the method places, in order
        reserve_tokens: room to leave in the cache for decoding

        The output's cache can be decoded from, marked and rewound, and has to be released. Raises ConfigError if the
        engine cannot read prompts by the plan's method.
        """

    @abstractmethod
    def run_each(self, ids: Sequence[int], cache: FusedCache) -> Tensor:
        """Run tokens after all that a cache from `prefill` holds.

        Returns the logits after each of the tokens: float32 [n, vocab_size].
        """


def reads_by_layout(card: ModelCard, method: FusionMethod) -> bool:
    """Return whether an engine that loads blocks can read by this method.

    It can if the prompt's layout alone says which tokens to place and which to run, and every token has its place in
    the prompt as its position.
    """
    return method.reruns(Layout(())) is not None and method.additions(card).positions == "global"


EMBEDDED: Registry[Callable[[str | Path, str], EmbeddedModel]] = Registry(plugins.EMBEDDED)
"""Engines that run the model in this process, by name. Each value loads a model: it takes the model's name, and the
engine's address, which is the engine's name or "name:option=value,option=value".
"""

ENGINES: Registry[Callable[[str, str, str | None], Connection]] = Registry(plugins.ENGINES)
"""Other engines by the scheme of their addresses. Each takes an address, the model's fingerprint and a key, and raises
ConfigError for an address that it does not support."""
