"""Output of commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragcache.ingest.report import bytes_text as bytes_text

# A pipe has no width: rows are not to be cut for it.
PIPE_WIDTH = 10_000


def printable(text: object) -> str:
    """Text that may be written to a terminal: control characters, which could drive it, and bytes of file names that
    are not UTF-8 are written out."""
    whole = str(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in whole)


def say_error(error: object) -> None:
    """One line on standard error."""
    print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)


def say_note(text: object) -> None:
    """A line beside the result, on standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def say(text: object = "", *, end: str = "\n") -> None:
    """A line of the result."""
    print(printable(text), end=end, flush=True)


def print_json(value: Any) -> None:
    # Escaped, so that any terminal encoding and any lone surrogate in a file name can be written.
    print(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns whose name begins with ">" are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable("" if cell is None else cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)


def on_terminal() -> bool:
    """Whether progress may be drawn."""
    return sys.stderr.isatty()


def seconds_text(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
