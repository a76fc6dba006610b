"""How the server runs, and what a request gets that does not say otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragcache.engine.aio import THREADS
from ragcache.engine.options import Context, Order, Overflow
from ragcache.errors import ConfigError, check_least
from ragcache.retrieval.search import Search

MIB = 1 << 20
# One of the engine's threads is left for a change of the documents.
MAX_SLOTS = THREADS - 1


@dataclass(frozen=True)
class AnswerDefaults:
    """Options of a chat request that does not name them.

    k:           passages to retrieve
    max_tokens:  longest answer; None: until its end, or the context is full
    temperature: 0 is greedy
    top_p, top_k, seed, stop: as for `Sampling`
    search, filter, score_threshold, mmr_lambda, fetch_k, rerank: as for `RetrieveOptions`
    on_overflow, evict, order, hint, reasoning_effort, enable_thinking, thinking_budget, chat_template_kwargs: as for
                 `ReadOptions`
    context:     as for `RagCache.stream_chat`; a request with documents of its own is read by these alone
    """

    k: int = 5
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    search: Search = "vector"
    filter: Mapping[str, Any] | None = None
    score_threshold: float | None = None
    mmr_lambda: float | None = None
    fetch_k: int | None = None
    rerank: bool | None = None
    on_overflow: Overflow = "error"
    evict: int | None = None
    order: Order = "relevance"
    hint: bool = True
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    context: Context = "last"


@dataclass(frozen=True)
class ServerSettings:
    """Limits, keys and names.

    slots:            questions that are worked on at the same time; at most MAX_SLOTS
    max_queue:        questions that may wait for a slot; more are refused with 503
    timeout_s:        longest time for one question, waiting included
    write_wait_s:     how long a change of the documents waits for another one before 409
    drain_s:          how long running answers may go on once the server is told to stop
    max_body_bytes:   largest JSON body; max_upload_bytes: largest body of POST /v1/documents
    max_upload_files: files in one upload
    figures_s:        age up to which store figures are given again without looking at the disk
    api_keys:         any of them opens /v1; none: open to whoever reaches the port
    open_metrics:     /metrics needs no key
    allowed_hosts:    names in the Host header; empty: any
    model_name:       what the language model is called in /v1/models; its own name when None
    answers:          defaults of chat requests

    Raises ConfigError naming the field that is out of range.
    """

    slots: int = 8
    max_queue: int = 512
    timeout_s: float = 600.0
    write_wait_s: float = 10.0
    drain_s: float = 30.0
    max_body_bytes: int = 4 * MIB
    max_upload_bytes: int = 64 * MIB
    max_upload_files: int = 100
    figures_s: float = 5.0
    api_keys: Sequence[str] = ()
    open_metrics: bool = False
    allowed_hosts: Sequence[str] = ()
    model_name: str | None = None
    answers: AnswerDefaults = field(default_factory=AnswerDefaults)

    def __post_init__(self) -> None:
        least: dict[str, float] = {"slots": 1, "max_queue": 0, "write_wait_s": 0, "drain_s": 0, "figures_s": 0}
        least |= {"max_body_bytes": 1024, "max_upload_bytes": 1024, "max_upload_files": 1}
        for name, bound in least.items():
            check_least(name, getattr(self, name), bound)
        if self.slots > MAX_SLOTS:
            raise ConfigError(f"slots is {self.slots}; the engine has threads for {MAX_SLOTS}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be above 0")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty; leave it out or write one")
