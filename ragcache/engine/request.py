"""A question: its options, its prompt, and the time that each phase took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, get_args

from transformers import PreTrainedTokenizerBase

from ragcache.engine.answer import Timings
from ragcache.engine.history import History
from ragcache.engine.loader import Prefetch
from ragcache.engine.options import Order, Overflow
from ragcache.engine.tool_use import ToolUse
from ragcache.engine.verdict import Choice
from ragcache.errors import ConfigError, check_choice, check_least
from ragcache.fusion.fuse import PromptPlan
from ragcache.fusion.method import FusionMethod
from ragcache.kv.block_key import digest
from ragcache.models.deadline import Limit
from ragcache.models.sampler import Sampling
from ragcache.models.thoughts import Form, Thinking, ThoughtLimit
from ragcache.prompt import Prompt
from ragcache.retrieval.retriever import Hit


@dataclass(frozen=True)
class RequestOptions:
    """How to read and answer a prompt; see `GenerationOptions`.

    choice: the method that reads the prompt, and why
    ahead: reads of blocks that begin while retrieval still ranks; None: no such reads
    tools: functions that the model may call; None: no functions
    thinking: how the model's template makes it think; None: the model does not think, or there is no template (raw
              prompt)
    thinking_budget: tokens after which its thoughts are ended
    dropped_turns: oldest messages of the conversation that were left out
    continues: whether the answer continues the text at the prompt's end
    where: filter of the passages; passages that it hides are no neighbours either, and KV that was kept from questions
           under another filter is not reused
    pins: ids of the prompt up to each of its cache points, with the point's time to live
    found: whether passages were found in the caller's text, so that a later prompt may continue after them
    """

    choice: Choice
    sampling: Sampling = field(default_factory=Sampling)
    on_overflow: Overflow = "error"
    cancelled: threading.Event | None = None
    timeout_s: float | None = None
    ahead: Prefetch | None = None
    order: Order = "relevance"
    hint: bool = True
    tools: ToolUse | None = None
    thinking: Thinking | None = None
    thinking_budget: int | None = None
    dropped_turns: int = 0
    continues: bool = False
    where: Mapping[str, Any] | None = None
    found: bool = False
    pins: Sequence[tuple[Sequence[int], float]] = ()

    def __post_init__(self) -> None:
        if self.thinking_budget is not None:
            check_least("thinking_budget", self.thinking_budget, 0)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be above 0", "timeout_s")
        for name, known in (("order", get_args(Order)), ("on_overflow", get_args(Overflow))):
            check_choice(name, getattr(self, name), known)

    @property
    def method(self) -> FusionMethod:
        return self.choice.method

    def exactly(self, why: str) -> RequestOptions:
        """Return these options with full prefill as the method."""
        return replace(self, choice=self.choice.exactly(why))

    def limit(self, started: float) -> Limit:
        """Return the time limit of a question that began at `started`."""
        return Limit.of(self.cancelled, self.timeout_s, started)


class EarlierTurns(NamedTuple):
    """The turns of a conversation before this question, whose context the prompt continues.

    answered: called with this turn's new passages, the answer and its ids, before the answer is returned
    """

    history: History
    answered: Callable[[Sequence[Hit], str, Sequence[int]], None]


@dataclass(frozen=True)
class Request:
    """A question that is being answered.

    plan:    the prompt with everything that earlier turns keep, as the method reads it
    prompt:  the same as a single prefix, this question's passages and a suffix
    hits:    this question's passages
    dropped: how many of the best passages were left out
    """

    plan: PromptPlan
    prompt: Prompt
    hits: Sequence[Hit]
    dropped: int
    options: RequestOptions
    clock: Clock
    limit: Limit
    earlier_turns: EarlierTurns | None

    @property
    def all_hits(self) -> list[Hit]:
        """Return the passages of earlier turns, then this question's."""
        return [*(self.earlier_turns.history.hits if self.earlier_turns else ()), *self.hits]

    def has_begun_thoughts(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether the prompt ends with the opening of the model's thoughts.

        If the answer continues the prompt's last message, return whether the prompt ends inside those thoughts.
        """
        thinking, inside = self.options.thinking, self.options.continues
        ids = self.prompt.suffix_ids if inside else self.prompt.ids  # a passage may reach into the template's tail
        return thinking is not None and thinking.is_open(tokenizer, ids, inside=inside)

    def thoughts(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Form | None], Form] | None:
        """Return a function that limits the thoughts before a form (`decode`), or None if the model does not think."""
        thinking, budget = self.options.thinking, self.options.thinking_budget
        if thinking is None:
            return None
        return partial(ThoughtLimit, thinking, tokenizer, budget, self.has_begun_thoughts(tokenizer))

    @cached_property
    def filter_salt(self) -> str:
        """Return a digest of the question's filter, or "" without a filter."""
        return digest(self.options.where) if self.options.where else ""

    @cached_property
    def context_key(self) -> Hashable | None:
        """Return the key of everything before the suffix, or None if other questions cannot share it."""
        prompt, options = self.prompt, self.options
        if self.earlier_turns is not None or not options.method.shares_context:
            return None
        if not prompt.prefix_ids and not prompt.chunk_ids:
            return None
        return repr(options.method), prompt.parts[:-1], tuple(hit.chunk.cut_from for hit in self.hits)


@dataclass
class Clock:
    """Collects the times of a question's phases."""

    started: float
    retrieve_s: float = 0.0
    queue_s: float = 0.0
    _ttft_s: float | None = None
    _phases: dict[str, float] = field(default_factory=dict)

    def read(self, prefill_s: float, load_s: float = 0.0, encode_s: float = 0.0, place_s: float = 0.0) -> None:
        self._phases = {"load_s": load_s, "encode_s": encode_s, "place_s": place_s, "prefill_s": prefill_s}

    def first_token(self) -> None:
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self.started

    def timings(self) -> Timings:
        total_s = time.perf_counter() - self.started
        ttft_s = total_s if self._ttft_s is None else self._ttft_s
        phases = {"queue_s": self.queue_s, "retrieve_s": self.retrieve_s, **self._phases}
        return Timings(**phases, ttft_s=ttft_s, total_s=total_s)
