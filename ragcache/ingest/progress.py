"""Progress of an ingestion on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ragcache.ingest.report import Progress, ProgressEvent

LABELS = {
    "read": "Reading files",
    "embed": "Embedding chunks",
    "encode": "Precomputing KV (tokens)",
    "commit": "Storing documents",
}


def say_line(text: str) -> None:
    """Print a line to standard error, where the bars are."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show a progress bar for each stage on standard error, and yield the callback that updates them."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description:<26}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {stage: bars.add_task(label, total=None) for stage, label in LABELS.items()}

        def show(event: ProgressEvent) -> None:
            bars.update(tasks[event.stage], completed=event.done, total=event.total)

        yield show
        # A stage without work has no total: its bar would go on moving.
        for task in bars.tasks:
            bars.update(task.id, total=task.completed)
