"""All options, named here once: how a store is opened, how passages are found, and how a prompt is read and answered.

The engine's calls take the options of a question as keyword arguments. The command line, the server and the
integrations derive their options and help texts from these classes, and tests compare the names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict, get_args

from ragcache.errors import Config, ConfigError, UnknownOptionError, check_choice, check_least
from ragcache.retrieval.search import Search
from ragcache.store.eviction import ADMISSIONS, POLICIES

if TYPE_CHECKING:  # heavy imports, and `ragcache --help` loads this file too
    from ragcache.engine.passages import Passage
    from ragcache.fusion.method import FusionMethod
    from ragcache.models.sampler import Sampling
    from ragcache.retrieval.retriever import Hit
    from ragcache.store.filters import Filter

DEFAULT_K = 5
Overflow = Literal["error", "trim"]
Order = Literal["relevance", "shared"]
ContextMode = Literal["last", "keep"]
Load = Literal["auto", "always", "never"]
Learn = Literal["second", "first", "off"]
NeighboursFrom = Literal["similarity", "document"]


class Option(NamedTuple):
    """How a field is written outside of Python: `Annotated[int, Option("--slots", "Questions answered at a time.")]`.

    help:        for the command line, and in /openapi.json
    least, most: bounds for the value in a request
    is_size:     a number of bytes; the command line also takes 512MiB and the like
    """

    flag: str
    help: str
    least: float | None = None
    most: float | None = None
    is_size: bool = False


Size = partial(Option, is_size=True)


@dataclass(frozen=True)
class StoreConfig(Config):
    """How a store is opened. Each field's `Option` describes it; further details:

    database:     None: SQLite inside the store's directory. The directory records which database has its documents, and
                  another database is refused
    codec, eviction, admission, device_bytes, disk_bytes, ttl_s: see KVStore
    index:        "flat" (exact), "hnsw", or "pgvector" (in the PostgreSQL database)
    read_only:    nothing is written, not even computed blocks
    prefix_bytes: budget for KV on the model's device that stays for later questions: exact KV of prompts, answers and
                  system prompts, and placed contexts; 0: nothing is kept, each question reads its prefix
    load:         "auto": load a block or compute it, whichever is faster by the measured rates; "always": load every
                  block that a tier has; "never": compute every block that is not in memory
    remote:       blocks are kept there; this machine's disk holds copies, within disk_bytes
    neighbours:   how many other chunks of the store precede each chunk when it is encoded (see `Recipe`); None: as the
                  store was created. A new, empty store of a model that was not trained for reuse then gets 2, and a
                  primer
    neighbours_from: "similarity": the nearest chunks; "document": the preceding chunks of its document; None: as the
                     store was created, for a new store similarity (document if `is_shared`)
    learn:        "second": text of a prompt that an earlier prompt had elsewhere is kept in the foreign cache; "first":
                  at once; "off": never
    measure_s:    seconds to measure at the first opening with a model; later openings measure the disk alone, in a
                  third of that time; 0 measures nothing
    is_shared:    whether callers with different API keys use the store. Chunks of a new store then get neighbours from
                  their own document, so that no key's documents change the answers to another key's questions
    """

    database: Annotated[
        str | None, Option("--database", "SQLAlchemy URL of the document store; SQLite in the store if not given.")
    ] = None
    memory_bytes: Annotated[int, Size("--memory", "Budget of the host-memory tier.")] = 2 << 30
    codec: Annotated[
        str, Option("--codec", "How new KV blocks are kept; `ragcache plan` lists the codecs. All are read.")
    ] = "raw"
    eviction: Annotated[str, Option("--eviction", f"What a tier gives up when it is full: {', '.join(POLICIES)}.")] = (
        "hyperbolic"
    )
    index: Annotated[
        Literal["flat", "hnsw", "pgvector"],
        Option("--index", "Kind of vector index: flat is exact, hnsw faster, pgvector in a PostgreSQL --database."),
    ] = "flat"
    read_only: bool = False
    admission: Annotated[
        str, Option("--admission", f"Filter for what may take its place: {', '.join(ADMISSIONS)}.")
    ] = "all"
    prefix_bytes: Annotated[
        int,
        Size("--prefix-memory", "Budget for exact KV of earlier prompts, which --method full goes on from; 0: none."),
    ] = 512 << 20
    answer_bytes: Annotated[
        int | None,
        Size(
            "--answer-memory",
            "KV that all answers in progress may hold together; more wait. Half of the device's memory if not given.",
        ),
    ] = None
    graph_bytes: Annotated[
        int | None,
        Size(
            "--graph-memory",
            "Memory of CUDA graphs, for KV and scratch; 0: none are used. An eighth of what is free if not given.",
        ),
    ] = None
    load: Annotated[
        Load, Option("--load", "Blocks on disk: load or compute, whichever is faster (auto); always load; never.")
    ] = "auto"
    speculative_bytes: Annotated[
        int, Size("--speculative", "Bytes of blocks that may be read while retrieval still ranks; 0: none.")
    ] = 256 << 20
    measure_s: Annotated[
        float, Option("--measure-time", "Seconds to measure this machine for, the first time a store is opened.")
    ] = 0.25
    device_bytes: Annotated[
        int, Size("--device-memory", "Budget for KV blocks on the model's device; 0: none are kept there.")
    ] = 0
    disk_bytes: Annotated[int | None, Size("--disk", "Budget of the disk tier; without one it keeps every block.")] = (
        None
    )
    ttl_s: Annotated[
        float | None, Option("--ttl", "Drop blocks that were not used for so many seconds; pinned ones stay.")
    ] = None
    remote: Annotated[
        str | None,
        Option(
            "--remote",
            "URL of a remote for blocks that machines share, as s3://bucket/prefix or redis://host:6379/0; the store's "
            "own if not given.",
        ),
    ] = field(default=None, repr=False)  # may contain a password
    foreign_cache: Annotated[
        int, Size("--foreign-cache", "Disk budget for KV of prompts, and of passages that are no document's; 0: none.")
    ] = 10 << 30
    encrypt: Annotated[
        bool | None,
        Option(
            "--encrypt/--no-encrypt", "Encrypt a new store's KV and index (AES-256-GCM); as it was made if not given."
        ),
    ] = None
    learn: Annotated[
        Learn, Option("--learn", "Keep text of prompts as passages: at its second sight, at the first, or never (off).")
    ] = "second"
    neighbours: Annotated[
        int | None,
        Option(
            "--neighbours", "Other passages that each one's KV is computed behind; as the store was made if not given."
        ),
    ] = None
    neighbours_from: Annotated[
        NeighboursFrom | None,
        Option("--neighbours-from", "Which ones: nearest by similarity, or those before it in its document."),
    ] = None
    is_shared: bool = False

    def __post_init__(self) -> None:
        if self.answer_bytes is not None and self.answer_bytes < 1:
            raise ConfigError(f"answer_bytes is {self.answer_bytes}; it must be at least 1, or None for a default")
        for name in ("foreign_cache", "speculative_bytes", "measure_s", "graph_bytes"):
            check_least(name, getattr(self, name) or 0, 0)
        check_choice("load", self.load, get_args(Load))
        check_choice("learn", self.learn, get_args(Learn))
        if self.neighbours is not None:
            from ragcache.kv.block_key import Recipe

            Recipe(neighbours=self.neighbours)  # raises ConfigError for an invalid number
        if self.neighbours_from is not None:
            check_choice("neighbours_from", self.neighbours_from, get_args(NeighboursFrom))


class RetrieveOptions(TypedDict, total=False):
    """Which passages are found.

    search:          "vector" (nearest embeddings), "text" (the question's words: BM25), or "hybrid" (both)
    filter:          on metadata; only chunks that pass it count
    score_threshold: leave out chunks with a lower inner product
    mmr_lambda:      choose for variety too (maximal marginal relevance): 1 is the plain ranking, 0 variety alone
    fetch_k:         how many candidates mmr_lambda or the reranker chooses from; 5 * k when None
    rerank:          let the reranker that the store was opened with choose and order the passages; None: if the store
                     has a reranker and mmr_lambda is None
    """

    search: Search
    filter: Filter | None
    score_threshold: float | None
    mmr_lambda: float | None
    fetch_k: int | None
    rerank: bool | None


class GenerationOptions(TypedDict, total=False):
    """How a prompt is read and answered.

    method:         fusion method that replaces the store's
    method_options: options of `method`, or of the store's own method
    sampling:       a `Sampling`; greedy when None
    on_overflow:    when the passages do not fit the model's context: "error", or "trim" whole passages from the end
                    (`Answer.dropped` says how many)
    cancelled:      set it to stop
    timeout_s:      how long the whole answer may take, including waits for memory and for the model
    order:          of the passages: "relevance", or "shared": as `full` finds most of them in the prefix tree (no
                    effect on methods that read blocks)
    hint:           with "shared": a line before the question says which passages are the most relevant
    reasoning_effort: how much the model thinks before it answers: "none" to "xhigh"; None: as its chat template says
    enable_thinking: whether the model thinks before it answers, for chat templates with this variable, such as Qwen3's;
                     None: as the chat template says
    thinking_budget: tokens after which the model's thoughts are ended and it has to answer; None: any number
    chat_template_kwargs: further variables of the chat template. A raw prompt ignores these last four
    """

    method: str | FusionMethod | None
    method_options: Mapping[str, Any] | None
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


class AskOptions(RetrieveOptions, GenerationOptions, total=False):
    """Options of a question.

    hits:   passages to read instead of retrieving, best first
    system: system prompt that replaces the store's; "": none
    """

    hits: Sequence[Hit | Passage] | None
    system: str | None


class CachePoint(NamedTuple):
    """A place in a conversation up to which the KV of its prompt is kept from eviction.

    messages: the conversation up to the place, as it was given; the last message may be cut
    ttl_s:    for how many seconds after the answer
    """

    messages: Sequence[Mapping[str, Any]]
    ttl_s: float = 300.0


class ChatOptions(RetrieveOptions, GenerationOptions, total=False):
    """Options of a conversation.

    passages: passages to put in front of the last user message (of the first if the store's blocks are encoded after
              its prefix); excludes passages in the messages and k
    k:        how many passages to retrieve for the last user message and put there; excludes `passages` and passages
              in the messages
    context:  "last": the model reads the passages of one turn; "keep": each turn's passages stay at their position, so
              that every prompt extends the previous prompt. The passages are in the messages, or are retrieved by k.
              Passages that the conversation has read are not read again; while it does not fit the model, the oldest
              passages are dropped
    drop_turns: leave out the oldest messages, each question with its answers, if the conversation does not fit the
                model (`Answer.dropped_turns` says how many); system messages and the last question stay. False: such a
                conversation raises ContextTooLongError
    system:   as for `AskOptions`, if no message is a system message
    tools:    functions that the model may call, as OpenAI's API and chat templates take them: {"type": "function",
              "function": {"name": ..., "description": ..., "parameters": a JSON schema}}
    tool_choice: "auto", "none", "required" (at least one call), or the name of the function to call. The last two
                 restrict the answer to JSON of the tools' schemas; they need the extra "structured"
    parallel_tool_calls: False: at most one call
    tool_format: how the model writes calls, a name in `ragcache.models.tool_calls.FORMATS`; None: as its chat template
                 says
    pins: places up to which the prompt's KV is kept from eviction in memory, within half of the prefix tree's budget;
          `Usage.pinned_tokens` says how many tokens are kept. Retrieved passages, and everything after them, cannot be
          pinned. An engine in another process pins nothing
    """

    passages: Sequence[Hit | Passage] | None
    k: int | None
    context: ContextMode
    drop_turns: bool
    system: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    tool_format: str | None
    pins: Sequence[CachePoint]


MetadataFilter = Annotated[
    Mapping[str, Any] | None,
    Option("--filter", 'Only documents whose metadata pass, as JSON: {"year": {"$gte": 2020}}.'),
]


@dataclass(frozen=True)
class AnswerOptions:
    """Defaults for answering questions: options of the command line and defaults of the server.

    The fields are those of `Sampling`, `RetrieveOptions` and `GenerationOptions`, which describe them in full. k: as
    for `RagCache.ask`
    """

    k: Annotated[int, Option("--k", "Passages to read.", 1, 1000)] = DEFAULT_K
    max_tokens: Annotated[
        int | None, Option("--max-tokens", "Longest answer, in tokens; by default until its end, or the context's.")
    ] = None
    temperature: Annotated[float, Option("--temperature", "0 is greedy.")] = 0.0
    top_p: Annotated[float | None, Option("--top-p", "Nucleus sampling.")] = None
    top_k: Annotated[
        int | None, Option("--top-k", "Sample among this many tokens; --k is of passages.", 1, 2**31 - 1)
    ] = None
    seed: Annotated[int | None, Option("--seed", "Makes sampling repeatable.")] = None
    stop: Annotated[Sequence[str], Option("--stop", "End the answer at this string; may be repeated.")] = ()
    search: Annotated[Search, Option("--search", "Find passages by embedding, by the question's words, or both.")] = (
        "vector"
    )
    filter: MetadataFilter = None
    score_threshold: Annotated[float | None, Option("--score-threshold", "Leave out passages with a lower score.")] = (
        None
    )
    mmr_lambda: Annotated[
        float | None, Option("--mmr-lambda", "Choose passages for variety too: 1 is the plain ranking.", 0, 1)
    ] = None
    fetch_k: Annotated[
        int | None,
        Option("--fetch-k", "Passages that variety or the reranker chooses from; 5 times k if not given.", 1, 10_000),
    ] = None
    rerank: Annotated[
        bool | None,
        Option("--rerank/--no-rerank", "Ask the reranker; by default where there is one and no choice for variety."),
    ] = None
    on_overflow: Annotated[
        Overflow, Option("--on-overflow", "Passages that do not fit: refuse, or leave whole ones out.")
    ] = "error"
    order: Annotated[
        Order, Option("--order", "Of the passages: as they rank, or as method full finds most of them read already.")
    ] = "relevance"
    hint: Annotated[
        bool, Option("--hint/--no-hint", "With order shared: say before the question which passages rank first.")
    ] = True
    reasoning_effort: Annotated[
        str | None, Option("--reasoning-effort", "How much a model thinks before it answers: none, low, medium, high.")
    ] = None
    enable_thinking: Annotated[
        bool | None,
        Option("--thinking/--no-thinking", "Whether it thinks at all; by default as its chat template has it."),
    ] = None
    thinking_budget: Annotated[
        int | None, Option("--thinking-budget", "End its thoughts after so many tokens.", 0, 2**31 - 1)
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        Option("--chat-template-kwargs", 'Further variables of the chat template: {"enable_thinking": false}.'),
    ] = None

    def call_options(self) -> dict[str, Any]:
        """Return the arguments of `RagCache.ask` and `RagCache.stream`. Raises ConfigError."""
        from ragcache.models.sampler import Sampling

        sampling = Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k, self.seed, tuple(self.stop))
        known = (*names(RetrieveOptions), *names(GenerationOptions))
        values = {name: value for name, value in vars(self).items() if name in known}
        return {"k": self.k, "sampling": sampling, **values}


@dataclass(frozen=True)
class AnswerDefaults(AnswerOptions):
    """Defaults for conversations and for requests to the server, which may override them.

    context: as for `ChatOptions`; a request with its own documents reads only these
    drop_turns: as for `ChatOptions`
    """

    context: Annotated[
        ContextMode,
        Option("--context", "Passages that a turn is read over: its own, or those of the turns before it, too."),
    ] = "last"
    drop_turns: Annotated[
        bool,
        Option("--drop-turns/--no-drop-turns", "Leave out a chat's oldest messages where it does not fit the model."),
    ] = True


def names(options: type) -> tuple[str, ...]:
    """Return the option names of an options class, in their order."""
    return tuple(options.__annotations__)


OPEN = "RagCache.open"
SAID = (
    ("ask", "k=... for passages, sampling=rc.Sampling(top_k=...) for tokens", "top_k"),
    ("ask", "k=...", "similarity_top_k top_n n_results num_results max_num_results"),
    ("ask", "filter=...", "filters where"),
    ("ask", "system=...", "system_prompt"),
    (OPEN, "model=...", "model model_name model_id model_path llm"),
    (OPEN, "embedder=...", "embedder embedding_model embed_model embedding embeddings"),
)
"""For each option that other libraries name otherwise: the call that takes it here, how it is written, and those names.
"""


def said(name: str, known: Iterable[str]) -> str | None:
    """Return how to write an option that a caller has named `name`, or None if no call has such an option.

    name: the option's name here or in another library
    known: options of the function that was called; for any other option, the function that takes it is named, too
    """
    from ragcache.ingest.chunker import ChunkerConfig
    from ragcache.models.sampler import Sampling

    configs = (("ask", "sampling=", Sampling), (OPEN, "store=", StoreConfig), (OPEN, "chunker=", ChunkerConfig))
    ways = [(call, way) for call, way, words in SAID if name in words.split()]
    ways += [(call, f"{start}{way}") for call, start, config in configs if (way := config.said(name))]
    ways += [("ask", f"{name}=...")] if name in ("k", *names(AskOptions)) else []
    found = next(iter(ways), None)
    return found and (found[1] if found[1].partition("=")[0] in known else f"{found[0]}(..., {found[1]})")


def check_names(stated: Iterable[str], known: Sequence[str]) -> None:
    """Raise UnknownOptionError if a stated name is not in `known`, with the right spelling or a list of options."""
    if unknown := [name for name in stated if name not in known]:
        places = (*known, "k") if "search" in known else known
        ways = list(dict.fromkeys(way for name in unknown if (way := said(name, places)) is not None))
        out = [f"the options are {', '.join(known)}"] if all(way.startswith("ask(") for way in ways) else []
        for call in ("sampling=rc.Sampling(", "store=rc.StoreConfig("):  # join several fields into a single call
            if len(own := [way for way in ways if way.startswith(call)]) > 1:
                ways = [way for way in ways if way not in own]
                ways.append(f"{call}{', '.join(way.removeprefix(call)[:-1] for way in own)})")
        out += [f"say {', '.join(ways)}"] if ways else []
        raise UnknownOptionError(f"there is no option {', '.join(unknown)}; {'; '.join(out)}", unknown[0])


def retrieval(options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that say which passages are found."""
    return {name: options[name] for name in names(RetrieveOptions) if name in options}
