"""The options, in groups that commands share. Every option is an environment variable RAGCACHE_* too."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragcache.cli.terminal import on_terminal
from ragcache.engine.options import Context, Order, Overflow, ReadOptions, RetrieveOptions, names
from ragcache.errors import ConfigError
from ragcache.retrieval.search import Search
from ragcache.store.eviction import ADMISSIONS, POLICIES

if TYPE_CHECKING:
    from ragcache import ChunkerConfig, IngestConfig, Library, RagCache, Recipe, Sampling, StoreConfig
    from ragcache.fusion.method import FusionMethod


UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def option(flag: str, help: str, **more: Any) -> Any:
    """An option `--some-name` (or `--some-name/--no-some-name`) with the environment variable RAGCACHE_SOME_NAME."""
    variable = "RAGCACHE_" + flag.split("/")[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(flag, envvar=variable, help=help, **more)


def size(text: str | int) -> int:
    """Bytes from "512MiB", "2GB" or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 512MiB, 2GiB or a number of bytes")
    return int(float(found[1]) * unit)


def size_option(flag: str, help: str, default: str | bool = True) -> Any:
    """`option` for a number of bytes. default: how the help shows it; True: as it is."""
    return option(flag, help, parser=size, metavar="SIZE", show_default=default)


def json_object(text: str | None, name: str = "--filter", example: str = '{"year": 2024}') -> dict[str, Any] | None:
    """Raises ConfigError naming the option when the text is not a JSON object."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} is not JSON ({error}); write it like {example}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} {text!r} is not a JSON object; write it like {example}")
    return value


def json_or_text(text: str) -> Any:
    """The value of an option: JSON, or else the text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def method_options(texts: Sequence[str]) -> dict[str, Any]:
    """["ratio=0.15", "mode=fusion"] -> {"ratio": 0.15, "mode": "fusion"}: values are JSON, or else plain text."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise ConfigError(f"--option {text!r} is not NAME=VALUE; write it like ratio=0.15")
        found[name.strip().replace("-", "_")] = json_or_text(value)
    return found


Json = Annotated[bool, option("--json", "Print JSON and nothing else on standard output.")]
FilterText = Annotated[
    str | None, option("--filter", 'Only documents whose metadata pass, as JSON: {"year": {"$gte": 2020}}.')
]
Wait = Annotated[float, option("--wait", "Seconds to wait for another process that is writing.", min=0)]
WAIT_S = 30.0
Timeout = Annotated[float | None, option("--timeout", "Seconds for one question, waiting included.")]


@dataclass(frozen=True)
class StoreOptions:
    """Place of the knowledge base, and how it is opened: the fields of StoreConfig."""

    store: Annotated[Path, option("--store", "Directory of the store.")] = Path("kb")
    database: Annotated[
        str | None, option("--database", "SQLAlchemy URL of the document store; SQLite in the store if not given.")
    ] = None
    memory_bytes: Annotated[int, size_option("--memory", "Budget of the host-memory tier.", "2GiB")] = 2 * 2**30
    codec: Annotated[
        str, option("--codec", "How new KV blocks are kept; `ragcache plan` lists the codecs. All are read.")
    ] = "raw"
    eviction: Annotated[str, option("--eviction", f"What a tier gives up when it is full: {', '.join(POLICIES)}.")] = (
        "lru"
    )
    admission: Annotated[
        str, option("--admission", f"Filter for what may take its place: {', '.join(ADMISSIONS)}.")
    ] = "all"
    trace: Annotated[
        Path | None, option("--trace", "Append every access to blocks to this file, for `ragcache simulate`; no text.")
    ] = None
    prefix_bytes: Annotated[
        int,
        size_option(
            "--prefix-memory", "Budget for exact KV of earlier prompts, which --method full goes on from; 0: none.",
            "512MiB",
        ),
    ] = 512 * 2**20  # fmt: skip
    foreign_cache: Annotated[
        int,
        size_option("--foreign-cache", "Disk budget for KV of passages that are no document's; 0: none.", "10GiB"),
    ] = 10 << 30
    load: Annotated[
        Literal["auto", "always", "never"],
        option("--load", "Blocks on disk: load or compute, whichever is faster (auto); always load; never."),
    ] = "auto"
    speculative_bytes: Annotated[
        int,
        size_option(
            "--speculative", "Bytes of blocks that may be read while retrieval still ranks; 0: none.", "256MiB"
        ),
    ] = 256 * 2**20
    measure_s: Annotated[
        float,
        option("--measure-time", "Seconds to measure this machine for, the first time a store is opened.", min=0),
    ] = 0.25
    answer_bytes: Annotated[
        int | None,
        size_option(
            "--answer-memory",
            "KV that all answers in progress may hold together; more wait. Half of the device's memory if not given.",
        ),
    ] = None
    device_bytes: Annotated[
        int, size_option("--device-memory", "Budget for KV blocks on the model's device; 0: none are kept there.", "0")
    ] = 0
    disk_bytes: Annotated[
        int | None, size_option("--disk", "Budget of the disk tier; without one it keeps every block.")
    ] = None
    write_behind_bytes: Annotated[
        int,
        size_option(
            "--write-behind", "Blocks that questions leave to be written later, in bytes; 0: each is written at once.",
            "0",
        ),
    ] = 0  # fmt: skip
    ttl_s: Annotated[
        float | None, option("--ttl", "Drop blocks that were not used for so many seconds; pinned ones stay.")
    ] = None
    remote: Annotated[
        str | None,
        option(
            "--remote",
            "URL of a remote for blocks that machines share, as s3://bucket/prefix or redis://host:6379/0; the store's "
            "own if not given.",
        ),
    ] = None
    index: Annotated[
        Literal["flat", "hnsw", "ivfpq", "pgvector"],
        option("--index", "Kind of vector index: flat is exact, ivfpq small, pgvector in a PostgreSQL --database."),
    ] = "flat"

    neighbours: Annotated[
        int | None,
        option("--neighbours", "Other passages that each one's KV is computed behind; the store's own if not given."),
    ] = None

    neighbours_from: Annotated[
        Literal["similarity", "document"] | None,
        option("--neighbours-from", "Which ones: nearest by similarity, or those before it in its document."),
    ] = None

    def config(self, *, read_only: bool = False) -> StoreConfig:
        from ragcache import StoreConfig

        given = {name: value for name, value in vars(self).items() if name != "store"}
        return StoreConfig(**given, read_only=read_only)


@dataclass(frozen=True)
class ModelOptions:
    """Models that read and embed."""

    model: Annotated[
        str | None,
        option(
            "--model",
            "Bundled name, smollm2, directory, hub id or GGUF file; the store's own if not given, mini if new.",
        ),
    ] = None
    method: Annotated[
        str | None,
        option(
            "--method",
            "See `ragcache methods`; else as trained or checked, or full where it is quick; auto: as checked first.",
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        option("--option", "Option of --method, such as ratio=0.15; may be repeated.", metavar="NAME=VALUE"),
    ] = None
    recipe: Annotated[
        str | None, option("--recipe", "How passages are encoded: isolated or prefix; the method's own if not given.")
    ] = None
    kv_kept: Annotated[
        float | None,
        option(
            "--kv-kept",
            "Share of each passage's KV that a new store keeps, by KVzip: passages are read twice at ingestion.",
            show_default="all; the store's own",
        ),
    ] = None
    kv_task: Annotated[
        str | None,
        option(
            "--kv-task", "With --kv-kept: keep what this task, or these examples, attend to, whatever else is asked."
        ),
    ] = None
    embedder: Annotated[
        str | None, option("--embedder", "minilm, contriever, directory or hub id; the store's own if not given.")
    ] = None
    reranker: Annotated[
        str | None, option("--reranker", "Directory or hub id of a cross-encoder that orders what a search finds.")
    ] = None
    dtype: Annotated[str | None, option("--dtype", "float32, bfloat16, float16 or auto; the store's own.")] = None
    device: Annotated[str, option("--device", "Where the models run: auto, cuda, xpu, mps or cpu.")] = "auto"
    system: Annotated[str | None, option("--system", "System prompt, before all passages.")] = None
    tenant: Annotated[
        str,
        option("--tenant", "Salt of block keys. Separates nothing else: every tenant sees and deletes all documents."),
    ] = ""

    def chosen_method(self) -> FusionMethod | str | None:
        """The method asked for, with its options; None for the model's own; "auto" as it is.

        Raises ConfigError naming the option.
        """
        options = method_options(self.option or [])
        if self.method is None:
            if options:
                raise ConfigError(f"--option {next(iter(options))}=... needs --method: say whose option it is")
            return None
        if self.method == "auto" and not options:
            return self.method
        from ragcache.fusion import get_method

        return get_method(self.method, **options)

    def chosen_recipe(self) -> Recipe | str | None:
        """Raises ConfigError naming the option."""
        if self.kv_kept is None:
            if self.kv_task:
                raise ConfigError("--kv-task says which KV is dropped; say with --kv-kept how much stays")
            return self.recipe
        from ragcache import Recipe

        return Recipe(self.recipe or "isolated", kept=self.kv_kept, task=self.kv_task or "")


@dataclass(frozen=True)
class WhereOptions:
    """Where the model runs."""

    engine: Annotated[
        str | None,
        option(
            "--engine",
            "vllm://host:port of `ragcache vllm` over this store, with RAGCACHE_ENGINE_KEY as its key; this process if "
            "not given.",
        ),
    ] = None


@dataclass(frozen=True)
class ChunkOptions:
    """How documents are cut."""

    chunk_max_tokens: Annotated[int, option("--chunk-max-tokens", "Longest passage, in the model's tokens.")] = 256
    chunk_overlap: Annotated[int, option("--chunk-overlap", "Tokens that neighbouring passages share at most.")] = 0
    compress: Annotated[
        str | None,
        option("--compress", "Directory or hub id of a token classifier that leaves out words (LLMLingua-2)."),
    ] = None
    compress_keep: Annotated[float, option("--compress-keep", "Share of tokens that --compress keeps.")] = 0.5

    def config(self) -> ChunkerConfig:
        from ragcache import ChunkerConfig

        # Short passages need a smaller least size than the default one.
        least = min(32, max(0, self.chunk_max_tokens) // 4)
        return ChunkerConfig(self.chunk_max_tokens, least, self.chunk_overlap, self.compress, self.compress_keep)


@dataclass(frozen=True)
class ReadLimitOptions:
    """Limits of reading one document; one that needs more fails, and the others go on."""

    read_time: Annotated[float, option("--read-time", "Seconds for reading one file.")] = 120.0
    read_memory: Annotated[int, size_option("--read-memory", "Memory for reading a file.", "512MiB")] = 512 << 20
    max_text: Annotated[int, size_option("--max-text", "Longest text of a document.", "8MiB")] = 8 << 20

    def config(self) -> IngestConfig:
        """Raises ConfigError."""
        from ragcache import IngestConfig
        from ragcache.ingest.document import ReadLimits

        return IngestConfig(reading=ReadLimits(self.read_time, self.read_memory, self.max_text))


@dataclass(frozen=True)
class AnswerOptions:
    """How a question is answered."""

    k: Annotated[int, option("--k", "Passages to read.")] = 5
    max_tokens: Annotated[
        int | None, option("--max-tokens", "Longest answer, in tokens; by default until its end, or the context's.")
    ] = None
    temperature: Annotated[float, option("--temperature", "0 is greedy.")] = 0.0
    top_p: Annotated[float | None, option("--top-p", "Nucleus sampling.")] = None
    top_k: Annotated[int | None, option("--top-k", "Sample among this many tokens.")] = None
    seed: Annotated[int | None, option("--seed", "Makes sampling repeatable.")] = None
    stop: Annotated[list[str] | None, option("--stop", "End the answer at this string; may be repeated.")] = None
    search: Annotated[Search, option("--search", "Find passages by embedding, by the question's words, or both.")] = (
        "vector"
    )
    filter: FilterText = None
    score_threshold: Annotated[float | None, option("--score-threshold", "Leave out passages with a lower score.")] = (
        None
    )
    mmr_lambda: Annotated[
        float | None, option("--mmr-lambda", "Choose passages for variety too: 1 is the plain ranking.")
    ] = None
    fetch_k: Annotated[
        int | None,
        option("--fetch-k", "Passages that --mmr-lambda or --reranker chooses from; 5 times --k if not given."),
    ] = None
    rerank: Annotated[
        bool | None,
        option("--rerank/--no-rerank", "Ask --reranker; by default where there is one and no --mmr-lambda."),
    ] = None
    on_overflow: Annotated[
        Overflow, option("--on-overflow", "Passages that do not fit: refuse, or leave whole ones out.")
    ] = "error"
    evict: Annotated[
        int | None,
        option("--evict", "After the first token, keep so many of the passages' tokens in each layer and KV head."),
    ] = None
    order: Annotated[
        Order,
        option("--order", "Of the passages: as they rank, or as --method full finds most of them read already."),
    ] = "relevance"
    hint: Annotated[
        bool, option("--hint/--no-hint", "With --order shared: say before the question which passages rank first.")
    ] = True
    reasoning_effort: Annotated[
        str | None, option("--reasoning-effort", "How much a model thinks before it answers: none, low, medium, high.")
    ] = None
    enable_thinking: Annotated[
        bool | None,
        option("--thinking/--no-thinking", "Whether it thinks at all; by default as its chat template has it."),
    ] = None
    thinking_budget: Annotated[int | None, option("--thinking-budget", "End its thoughts after so many tokens.")] = None
    chat_template_kwargs: Annotated[
        str | None, option("--chat-template-kwargs", "Further variables of the chat template, as a JSON object.")
    ] = None

    def sampling(self) -> Sampling:
        from ragcache import Sampling

        return Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k, self.seed, tuple(self.stop or ()))

    def stream_options(self) -> dict[str, Any]:
        """Arguments of `RagCache.stream` and `RagCache.ask`: k, sampling, and the fields that they know."""
        known = {*names(ReadOptions), *names(RetrieveOptions)}
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name in known}
        told = json_object(self.chat_template_kwargs, "--chat-template-kwargs", '{"enable_thinking": false}')
        own = {"filter": json_object(self.filter), "chat_template_kwargs": told}
        return {"k": self.k, "sampling": self.sampling(), **given, **own}


@dataclass(frozen=True)
class TurnOptions:
    """How a conversation goes on."""

    context: Annotated[
        Context,
        option("--context", "Passages that a turn is read over: its own, or those of the turns before it, too."),
    ] = "last"


# Open the knowledge base that the options name. The engine is imported here, not when the command line is built.


ENGINE_KEY = "RAGCACHE_ENGINE_KEY"
"""The secret shared with another engine comes from the environment alone: arguments are seen by others."""


def open_for_care(store: StoreOptions, *, read_only: bool = False) -> Library:
    """Open a store without models: for listing, deleting and checking. Raises StoreNotFoundError."""
    from ragcache import Library

    report_warnings()
    return Library.open(store.store, store=store.config(read_only=read_only))


def open_with_models(
    store: StoreOptions,
    models: ModelOptions,
    chunks: ChunkOptions | None = None,
    reading: ReadLimitOptions | None = None,
    *,
    where: WhereOptions | None = None,
    create: bool = False,
) -> RagCache:
    """Open a store with its models, to ask and to ingest."""
    from ragcache import RagCache

    report_warnings()
    hide_bars_in_pipes()
    return RagCache.open(
        store.store,
        model=models.model,
        method=models.chosen_method(),
        embedder=models.embedder,
        reranker=models.reranker,
        recipe=models.chosen_recipe(),
        dtype=models.dtype,
        device=models.device,
        system=models.system,
        chunker=chunks.config() if chunks else None,
        ingest=reading.config() if reading else None,
        store=store.config(),
        tenant=models.tenant,
        create=create,
        engine=where.engine if where else None,
        engine_key=os.environ.get(ENGINE_KEY) or None,
    )


def report_warnings() -> None:
    """Write what the library logs, such as a damaged block that was dropped, to standard error, one line each."""
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s")


def hide_bars_in_pipes() -> None:
    """transformers draws bars while it loads: on a terminal only."""
    if not on_terminal():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
