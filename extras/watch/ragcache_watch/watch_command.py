"""`ragcache watch`: `ragcache ingest --sync`, repeated whenever a file changes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ragcache.cli import flags
from ragcache.cli.ingest import KvMode, print_report
from ragcache.cli.terminal import command, say_error
from ragcache.errors import CancelledError, ReaderError, StoreBusyError


@command
def watch(
    folders: Annotated[list[Path], typer.Argument(help="Folders that the store is to follow.", metavar="FOLDER...")],
    store: flags.StoreOptions,
    models: flags.ModelOptions,
    chunks: flags.ChunkOptions,
    reading: flags.ReadLimitOptions,
    kv: KvMode = "eager",
    wait: flags.Wait = flags.WAIT_S,
) -> None:
    """Keep a store up to date with folders: `ingest --sync` now, and whenever something changes in them.

    A folder that vanishes is reported, and its documents stay until it is back. Ctrl-C or SIGTERM ends the command;
    what was stored stays.
    """
    from ragcache_watch.folders import watch_folders

    with flags.open_with_models(store, models, chunks, reading, create=True) as kb, stopped_by_signals() as stop:

        def sync(paths: Sequence[Path]) -> bool:
            """Ingest the paths and print the changes; return False if this has to be tried again."""
            try:
                report = kb.ingest(paths, kv=kv, sync=True, timeout_s=wait, cancelled=stop)
            except CancelledError:
                return True
            except (StoreBusyError, ReaderError) as error:
                say_error(error)
                return isinstance(error, ReaderError)  # vanished meanwhile: that is a separate change
            if report.added or report.updated or report.moved or report.removed:
                print_report(report, named=True)
            for failure in report.failed:
                say_error(failure.error)
            return True

        watch_folders(folders, sync, say_error, stop)


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, instead of their usual effect."""
    stop = threading.Event()
    before = {one: signal.signal(one, lambda *_: stop.set()) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
