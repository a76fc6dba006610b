"""The options of a question, named here once: how passages are found, and how a prompt is read and answered.

The engine's calls take them as keyword arguments. The command line, the server and the integrations derive theirs from
these classes, and tests compare the names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ragcache.errors import ConfigError
from ragcache.retrieval.search import Search

if TYPE_CHECKING:  # heavy ones: `ragcache --help` reads this file too
    from ragcache.engine.passages import Passage
    from ragcache.fusion.method import FusionMethod
    from ragcache.fusion.snapkv import SnapKV
    from ragcache.models.sampler import Sampling
    from ragcache.retrieval.retriever import Hit
    from ragcache.store.filters import Filter

DEFAULT_K = 5
Overflow = Literal["error", "trim"]
Order = Literal["relevance", "shared"]
Context = Literal["last", "keep"]


class RetrieveOptions(TypedDict, total=False):
    """Which passages are found.

    search:          "vector" (nearest embeddings), "text" (the question's words: BM25), or "hybrid" (both)
    filter:          on metadata; only chunks that pass it count
    score_threshold: leave out chunks with a lower inner product
    mmr_lambda:      choose for variety too (maximal marginal relevance): 1 is the plain ranking, 0 variety alone
    fetch_k:         how many candidates mmr_lambda or the reranker chooses from; 5 * k when None
    rerank:          have the reranker that the store was opened with choose and order them; None: where there is one
                     and mmr_lambda is None
    """

    search: Search
    filter: Filter | None
    score_threshold: float | None
    mmr_lambda: float | None
    fetch_k: int | None
    rerank: bool | None


class ReadOptions(TypedDict, total=False):
    """How a prompt is read and answered.

    method:         another fusion method than the one the store was opened with
    method_options: options of `method`, or of the store's own method
    evict:          what each layer and KV head keeps of the passages' tokens once the first token of the answer is
                    known: a budget or a SnapKV; None: what the store was opened with
    sampling:       a `Sampling`; greedy when None
    on_overflow:    when the passages do not fit the model's context: "error", or "trim" whole passages from the end
                    (`Answer.dropped` says how many)
    cancelled:      set it to stop
    timeout_s:      how long the whole answer may take, waiting for memory and for the model included
    order:          of the passages: "relevance", or "shared": as `full` finds most of them in the prefix tree (no
                    effect on methods that read blocks)
    hint:           with "shared": a line before the question says which passages are the most relevant
    reasoning_effort: how much a model thinks before it answers: "none" to "xhigh"; None: as its chat template has it
    enable_thinking: False: it answers at once; True: it thinks. For templates that know the word, such as Qwen3's
    thinking_budget: tokens after which its thoughts are ended, and it answers
    chat_template_kwargs: further variables of the chat template. These four are nothing to a raw prompt
    """

    method: str | FusionMethod | None
    method_options: Mapping[str, Any] | None
    evict: SnapKV | int | None
    sampling: Sampling | None
    on_overflow: Overflow
    cancelled: threading.Event | None
    timeout_s: float | None
    order: Order
    hint: bool
    reasoning_effort: str | None
    enable_thinking: bool | None
    thinking_budget: int | None
    chat_template_kwargs: Mapping[str, Any] | None


class AskOptions(RetrieveOptions, ReadOptions, total=False):
    """Options of one question.

    hits:   passages to read instead of retrieving, best first
    whole:  read every passage of the store, by `full`, from exact KV of all of them that is kept on disk; refused where
            they do not fit the model
    system: system prompt in place of the one that the store was opened with; "": none
    """

    hits: Sequence[Hit | Passage] | None
    whole: bool
    system: str | None


class ChatOptions(RetrieveOptions, ReadOptions, total=False):
    """Options of a conversation.

    passages: instead of passages in the messages, those to put in front of the last user message (of the first one
              where the store's blocks are encoded behind its prefix)
    k:        instead, how many passages to retrieve for the last user message and put there
    context:  "last": the model reads the passages of one turn; "keep": each turn's own, where they stood, so that
              every prompt is the one before with more behind it. They stand in the messages, or are retrieved by k;
              what the conversation has read is not read again. While it does not fit the model, the oldest go
    system:   as for `AskOptions`, where no message is a system message
    tools:    functions that the model may call, as OpenAI's API and chat templates take them: {"type": "function",
              "function": {"name": ..., "description": ..., "parameters": a JSON schema}}
    tool_choice: "auto", "none", "required" (one call at least), or the name of the function to call. The last two hold
              the answer to JSON of the tools' schemas; they need the extra "structured"
    parallel_tool_calls: False: one call at most
    tool_format: how the model writes calls, a name in `ragcache.models.tool_calls.FORMATS`; None: as its chat template
                 says
    """

    passages: Sequence[Hit | Passage] | None
    k: int | None
    context: Context
    system: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    tool_format: str | None


def names(options: type) -> tuple[str, ...]:
    """The names of one of these classes, in their order."""
    return tuple(options.__annotations__)


def check_names(given: Iterable[str], options: type) -> None:
    """Raises ConfigError that names the options there are not, and those there are."""
    known = names(options)
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    from ragcache.models.sampler import Sampling

    fields = [name for name in unknown if name in Sampling.__dataclass_fields__]
    way_out = f"the options are {', '.join(known)}"
    if fields and "sampling" in known:
        way_out = f"say sampling=rc.Sampling({', '.join(f'{name}=...' for name in fields)})"
    raise ConfigError(f"there is no option {', '.join(unknown)}; {way_out}", unknown[0])


def retrieval(options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that say which passages are found."""
    return {name: options[name] for name in names(RetrieveOptions) if name in options}
