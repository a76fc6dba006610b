"""Open the knowledge base that the options name. The engine is imported here, not when the command line is built."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ragcache.cli.options import ChunkOptions, ModelOptions, ReadLimitOptions, StoreOptions, WhereOptions
from ragcache.cli.output import on_terminal

if TYPE_CHECKING:
    from ragcache import Library, RagCache

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
