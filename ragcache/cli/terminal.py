"""Parts that all commands share: option groups, and errors as one line."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragcache.errors import ConfigError, RagCacheError
from ragcache.ingest.report import bytes_text as bytes_text

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
Function = Callable[..., None]


def command(function: Function) -> Function:
    """Make `function` a command.

    A parameter whose type is a dataclass stands for the options in that dataclass's fields: commands share options
    without repeating them. A RagCacheError becomes one line on standard error and exit status 1 (2 for ConfigError),
    an interrupt becomes status 130.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    def run(**given: Any) -> None:
        try:
            function(**_grouped(given, groups))
        except RagCacheError as error:
            say_error(error)
            raise typer.Exit(MISUSED if isinstance(error, ConfigError) else FAILED) from error
        except KeyboardInterrupt as error:
            say_error("interrupted; what was stored stays")
            raise typer.Exit(INTERRUPTED) from error

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = _signature(function, hints, groups)  # type: ignore[attr-defined]
    return run


def _grouped(given: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    """The function's own arguments: fields put back into their groups."""
    made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
    return {**given, **made}


def _signature(function: Function, hints: dict[str, Any], groups: dict[str, Any]) -> inspect.Signature:
    """The function's parameters with every group replaced by its fields."""
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _fields_as_parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
    return inspect.Signature(parameters)


def _fields_as_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


# Output of commands: results on standard output, everything else on standard error.


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
