"""Ingestion on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ragcache.ingest.report import Progress as Callback
from ragcache.ingest.report import ProgressEvent

LABELS = {
    "read": "Reading files",
    "embed": "Embedding chunks",
    "encode": "Precomputing KV (tokens)",
    "commit": "Storing documents",
}


def say_line(text: str) -> None:
    """A line on standard error, where the bars are."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Callback]:
    """A callback that draws one bar a stage, on standard error unless told otherwise."""
    columns = (TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(stderr=True)) as bars:
        tasks = {stage: bars.add_task(label, total=None) for stage, label in LABELS.items()}

        def show(event: ProgressEvent) -> None:
            bars.update(tasks[event.stage], completed=event.done, total=event.total)

        yield show
        for task in bars.tasks:
            bars.update(task.id, total=task.completed)
