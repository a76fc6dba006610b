"""Options of the commands, in groups that commands share."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ragcache.cli.terminal import json_or_text as json_or_text
from ragcache.cli.terminal import on_terminal
from ragcache.cli.terminal import option as option
from ragcache.cli.terminal import size_option as size_option
from ragcache.engine.options import StoreConfig
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache import ChunkerConfig, IngestConfig, RagCache, Recipe, Store
    from ragcache.fusion.method import FusionMethod


def method_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return options as a dictionary: ["ratio=0.15", "mode=fusion"] -> {"ratio": 0.15, "mode": "fusion"}.

    Values are parsed as JSON, or else kept as text. Raises ConfigError for an option that is not NAME=VALUE.
    """
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise ConfigError(f"--option {text!r} is not NAME=VALUE; write it like ratio=0.15")
        found[name.strip().replace("-", "_")] = json_or_text(value)
    return found


Json = Annotated[bool, option("--json", "Print JSON and nothing else on standard output.")]
Wait = Annotated[float, option("--wait", "Seconds to wait for another process that is writing.", min=0)]
WAIT_S = 30.0
Collection = Annotated[
    str | None, option("--collection", "Only this collection of documents; new ones go to `default` if not given.")
]
Timeout = Annotated[float | None, option("--timeout", "Seconds for one question, waiting included.")]


@dataclass(frozen=True)
class StoreOptions(StoreConfig):
    """Where the knowledge base is, and how it is opened."""

    store: Annotated[Path, option("--store", "Directory of the store.")] = Path("kb")

    @property
    def is_new(self) -> bool:
        """Return whether the store does not exist yet."""
        from ragcache.store.directory import StoreLayout

        return self.database is None and not StoreLayout(self.store).exists()


@dataclass(frozen=True)
class ModelOptions:
    """Language model, embedder and reranker, and how passages are read."""

    model: Annotated[
        str | None,
        option(
            "--model",
            "Bundled name, smollm2, directory, hub id, GGUF file or ollama:NAME; the store's own if not given, mini if "
            "new.",
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
        str | None,
        option("--recipe", "How passages are read: isolated, prefix or primer; as the store was made if not given."),
    ] = None
    primer: Annotated[
        str | None,
        option(
            "--primer",
            "Of recipe primer: 64, 128 or 256 tokens of ours, or a file with a text of yours.",
            show_default="128",
        ),
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

    def chosen_method(self) -> FusionMethod | str | None:
        """Return the chosen method with its options, "auto", or None for the model's own method.

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
        """Return the chosen recipe; None: the store's own. Raises ConfigError naming the option."""
        if self.kv_kept is None and self.kv_task:
            raise ConfigError("--kv-task says which KV is dropped; say with --kv-kept how much stays")
        if self.kv_kept is None and self.primer is None:
            return self.recipe
        from ragcache import Recipe
        from ragcache.models.primer import read_primer

        name = self.recipe or ("isolated" if self.primer is None else "primer")
        primer = "" if self.primer is None else read_primer(self.primer)
        return Recipe(name, kept=1.0 if self.kv_kept is None else self.kv_kept, task=self.kv_task or "", primer=primer)


@dataclass(frozen=True)
class EngineOptions(ModelOptions):
    """Model options for commands that can use another engine."""

    engine: Annotated[
        str | None,
        option(
            "--engine",
            "vllm://host:port of `ragcache vllm` over this store, with RAGCACHE_ENGINE_KEY as its key; llama.cpp for a "
            "GGUF file in this process; as the store was made if not given.",
        ),
    ] = None


@dataclass(frozen=True)
class ChunkOptions:
    """How documents are split into passages."""

    chunk_max_tokens: Annotated[int, option("--chunk-max-tokens", "Longest passage, in the model's tokens.")] = 256
    chunk_overlap: Annotated[int, option("--chunk-overlap", "Tokens that neighbouring passages share at most.")] = 0

    def config(self) -> ChunkerConfig:
        from ragcache import ChunkerConfig

        # The default minimum of a passage's tokens is too large if passages are short.
        least = min(32, max(0, self.chunk_max_tokens) // 4)
        return ChunkerConfig(self.chunk_max_tokens, least, self.chunk_overlap)


@dataclass(frozen=True)
class ReadLimitOptions:
    """Limits for reading a document; a document that needs more fails, and the others are read."""

    read_time: Annotated[float, option("--read-time", "Seconds for reading one file.")] = 120.0
    read_memory: Annotated[int, size_option("--read-memory", "Memory for reading a file.", "512MiB")] = 512 << 20
    max_text: Annotated[int, size_option("--max-text", "Longest text of a document.", "8MiB")] = 8 << 20
    encoding: Annotated[str | None, option("--encoding", "Encoding of text files that are not UTF-8, as cp1252.")] = (
        None
    )

    def config(self) -> IngestConfig:
        """Return the limits as a configuration. Raises ConfigError for an invalid limit."""
        from ragcache import IngestConfig
        from ragcache.ingest.read_limits import ReadLimits

        limits = ReadLimits(self.read_time, self.read_memory, self.max_text, encoding=self.encoding)
        return IngestConfig(reading=limits)


ENGINE_KEY = "RAGCACHE_ENGINE_KEY"
"""The secret shared with another engine is taken only from the environment, because arguments are visible to other
users.
"""


def open_for_care(store: StoreOptions, *, read_only: bool = False) -> Store:
    """Open a store without models: for listing, deleting and checking. Raises StoreNotFoundError."""
    from ragcache import Store

    report_warnings()
    return Store.open(store.store, store=replace(store, read_only=read_only))


def open_with_models(
    store: StoreOptions,
    models: ModelOptions,
    chunks: ChunkOptions | None = None,
    reading: ReadLimitOptions | None = None,
    *,
    create: bool = False,
) -> RagCache:
    """Open a store with its models, for questions and ingestion. create: make the store if it does not exist"""
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
        store=store,
        create=create,
        engine=models.engine if isinstance(models, EngineOptions) else None,
        engine_key=os.environ.get(ENGINE_KEY) or None,
    )


def report_warnings() -> None:
    """Write the library's warnings, such as about a damaged block that was dropped, to standard error, each on a
    line.
    """
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s")


def hide_bars_in_pipes() -> None:
    """Disable transformers' progress bars while models load, unless standard error is a terminal."""
    if not on_terminal():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
