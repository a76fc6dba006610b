"""reencode."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ragcache.cli.command import command
from ragcache.cli.documents import finish
from ragcache.cli.opening import open_for_care, open_with_models
from ragcache.cli.options import WAIT_S, Json, ModelOptions, StoreOptions, Wait, option
from ragcache.cli.output import on_terminal
from ragcache.errors import ConfigError


@command
def reencode(
    target: Annotated[Path, typer.Argument(help="Directory of the store to make.")],
    store: StoreOptions,
    models: ModelOptions,
    kv: Annotated[
        Literal["eager", "lazy"], option("--kv", "Compute KV now (eager), or on first use (lazy).")
    ] = "eager",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Make a store with the documents of --store for another --model.

    The passages stay as they were cut, with their ids and metadata. --store is not changed: delete it when the new one
    is what you want. After an interruption, run it again: it goes on from there.
    """
    from ragcache.ingest.report import progress_bars

    if models.model is None:
        raise ConfigError("say which model is to read the documents: --model")
    if target.resolve() == store.store.resolve():
        raise ConfigError(f"{target} is --store itself; a store is of one model, so name another directory")
    with open_for_care(store, read_only=True) as old:
        embedder = models.embedder or str(old.store.documents.properties().get("embedder", "minilm"))
        made = replace(store, store=target, database=None)
        with (
            open_with_models(made, replace(models, embedder=embedder), create=True) as kb,
            progress_bars() if on_terminal() else nullcontext() as bars,
        ):
            report = kb.copy(old, kv=kv, progress=bars, timeout_s=wait)
    finish(report, as_json)
