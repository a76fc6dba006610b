"""`ragcache record`: a server that also writes a log of its requests, for `ragcache plan` and `ragcache simulate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ragcache.cli.flags import EngineOptions, ReadLimitOptions, StoreOptions
from ragcache.cli.serve import AddressOptions, run_server
from ragcache.cli.terminal import command
from ragcache.engine.options import AnswerDefaults
from ragcache.server.settings import ServerSettings


@command
def record(
    store: StoreOptions,
    models: EngineOptions,
    answer: AnswerDefaults,
    address: AddressOptions,
    settings: ServerSettings,
    reading: ReadLimitOptions,
    log: Annotated[Path, typer.Argument(help="File to append to: hashes and lengths of each chat request, no text.")],
) -> None:
    """Serve as `ragcache serve` does, and append the hashes and lengths of each chat request to a file.

    `ragcache plan --trace FILE` sizes memory, disk and cards from it; `ragcache simulate FILE` compares budgets and
    policies; `python -m benchmarks week --trace FILE` replays it.
    """
    run_server(store, models, address, reading, replace(settings, answers=answer, record=log), web=False)
