"""The contract of what computes answers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from ragcache.engine.answer import Event
from ragcache.engine.asking.prompts import Prompts
from ragcache.engine.asking.reading import Clock, Kept, Reading
from ragcache.kv.prefix_tree import PrefixStats
from ragcache.models.scheduler import PassStats
from ragcache.prompt import PromptEnds
from ragcache.retrieval.retriever import Hit


class Engine(Protocol):
    """Answers prompts over hits that are already retrieved. Thread-safe.

    `Reader` runs the model in this process, `RemoteReader` has vLLM run it.
    """

    @property
    def prompts(self) -> Prompts: ...

    def check(self, reading: Reading) -> None:
        """Raises ConfigError for a question that cannot be read this way."""

    def stream(
        self, ends: PromptEnds, hits: Sequence[Hit], reading: Reading, clock: Clock, kept: Kept | None = None
    ) -> Generator[Event, None, None]:
        """Sources, then tokens, then the whole answer."""

    def drop_deleted(self) -> None:
        """Let go of what was computed over passages that are gone."""

    def clear(self) -> None:
        """Let go of everything that is kept between questions."""

    def warm_up(self) -> None:
        """Pay for what the first question would pay for."""

    def prefix_stats(self) -> PrefixStats: ...

    def pass_stats(self) -> PassStats:
        """Counts of the model's passes in this process."""
