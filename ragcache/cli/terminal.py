"""Parts that all commands share: options, one-line errors, and output of results and notes."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
import typer.core
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragcache.engine.options import Option, said
from ragcache.errors import ConfigError, RagCacheError
from ragcache.ingest.progress import progress_bars
from ragcache.ingest.report import ProgressEvent
from ragcache.ingest.report import bytes_text as bytes_text

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
PIPE_CLOSED = 141
"""Status of a program whose reader has left, as shells report it."""
Function = Callable[..., None]


# Bytes of each unit of a size, in capitals.
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


_DEPLOYMENT = (
    "store model database remote embedder reranker engine device dtype method k system recipe codec memory "
    "device-memory disk answer-memory prefix-memory host port api-keys-file model-name web open-metrics queue slots "
    "drain timeout max-tokens temperature max-body max-upload"
)
ENVIRONMENT = frozenset(_DEPLOYMENT.split())
"""Options that a deployment sets for all commands: each can be set by an environment variable too."""


def option(flag: str, help: str, *, environment: bool = True, **more: Any) -> Any:
    """Return typer's option `--some-name` or `--some-name/--no-some-name`.

    Args:
        flag: the option as it is written.
        help: its help text.
        environment: whether the variable RAGCACHE_SOME_NAME can set it, if `ENVIRONMENT` names it.
        more: typer's own arguments.
    """
    name = flag.split("/")[0].removeprefix("--")
    variable = f"RAGCACHE_{name.replace('-', '_').upper()}" if environment and name in ENVIRONMENT else None
    return typer.Option(flag, envvar=variable, help=help, **more)


def size(text: str | int) -> int:
    """Return the bytes of "512MiB", "2GB" or a plain number. Raises typer.BadParameter for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 512MiB, 2GiB or a number of bytes")
    return int(float(found[1]) * unit)


def size_option(flag: str, help: str, default: str | bool = True) -> Any:
    """Return an `option` for a number of bytes. default: how the help shows the default; True: as it is"""
    return option(flag, help, parser=size, metavar="SIZE", show_default=default)


def json_object(text: str, name: str, help: str) -> dict[str, Any]:
    """Return a parsed JSON object. Raises ConfigError naming the option, with an example, for any other text.

    help: the option's help text, which ends with an example
    """
    example = help[help.find("{") :].rstrip(".")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} is not JSON ({error}); write it like {example}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} {text!r} is not a JSON object; write it like {example}")
    return value


def json_or_text(text: str) -> Any:
    """Return an option's value parsed as JSON, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def command(function: Function) -> Function:
    """Make `function` a command.

    A parameter whose type is a dataclass adds an option for each field that declares an option, so that commands share
    options. A RagCacheError becomes a line on standard error and exit status 1 (2 for ConfigError), an interrupt
    becomes status 130.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: _fields(hint) for name, hint in hints.items() if is_dataclass(hint)}
    own = inspect.signature(function).parameters
    plain = {name: (hints[name], own[name].default) for name in own if name not in groups}

    def run(**values: Any) -> None:
        try:
            made = {name: hints[name](**_values(options, values)) for name, options in groups.items()}
            function(**made, **_values(plain, values))
        except RagCacheError as error:
            say_error(error)
            raise typer.Exit(MISUSED if isinstance(error, ConfigError) else FAILED) from error
        except KeyboardInterrupt as error:
            say_error("interrupted; what was stored stays")
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            raise typer.Exit(_unwritten(error)) from error

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    all_of_them = (groups.get(name, {name: plain[name]} if name in plain else {}) for name in own)
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(name, *declared) for options in all_of_them for name, declared in options.items()]
    )
    return run


def _unwritten(error: OSError) -> int:
    """Return the exit status for an error of writing to standard output, and redirect later output to nowhere.

    Raises the error again if it names a file, or does not mean that the output is full or closed.
    """
    if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered would fail again at the end
    if error.errno == errno.EPIPE:
        return PIPE_CLOSED
    say_error(f"standard output cannot be written ({error.strerror})")
    return FAILED


class Command(typer.core.TyperCommand):
    """A command that suggests an option for an unknown name: the option that other programs give this name, or an
    option with a similar name.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            wrong: Any = error  # typer has no public name for its class
            if hasattr(wrong, "possibilities"):
                name = wrong.option_name.strip("-").replace("-", "_")
                way = (said(name, ()) or "").partition("(..., ")[2].replace("ChunkerConfig(", "(chunk_")
                flags = {f"--{word.replace('_', '-')}" for word in (name, *re.findall(r"(\w+)=\.\.\.", way))}
                right = [flag for flag in sorted(flags) if any(flag in parameter.opts for parameter in self.params)]
                wrong.possibilities = right or wrong.possibilities
            raise


Options = dict[str, tuple[Any, Any]]
"""Type and default of each option, by name."""


def _fields(group: Any) -> Options:
    """Return a group's options, its own before those of base classes."""
    hints = get_type_hints(group, include_extras=True)
    return {
        field.name: (hints[field.name], inspect.Parameter.empty if field.default is MISSING else field.default)
        for field in sorted(fields(group), key=lambda field: field.name not in group.__annotations__)
        if hasattr(hints[field.name], "__metadata__")
    }


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Return the parameter in types that typer can read: typer knows neither `Option` nor mappings nor unions, and no
    sequences but lists.
    """
    declared = _option_of(hint)
    if declared is not None:
        kind = hint.__origin__
        for held, readable in ((Mapping, str | None), (Sequence, list[str] | None)):
            kind = readable if held in _kinds(kind) else kind
        make = partial(size_option, default=_size_text(default)) if declared.is_size else option
        hint, default = Annotated[kind, make(declared.flag, declared.help)], None if default == () else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _values(options: Options, given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of these options, converted to their types. Raises ConfigError."""
    found = {name: given[name] for name in options}
    for name, (hint, _) in options.items():
        declared = _option_of(hint)
        if declared is not None and Mapping in _kinds(hint.__origin__) and found[name] is not None:
            found[name] = json_object(found[name], declared.flag, declared.help)
        elif declared is not None and Sequence in _kinds(hint.__origin__):
            found[name] = tuple(found[name] or ())
    return found


def _option_of(hint: Any) -> Option | None:
    return next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Option)), None)


def _kinds(hint: Any) -> set[Any]:
    """Return a type and, for a union, its members, without their type arguments."""
    return {get_origin(kind) or kind for kind in (hint, *get_args(hint)) if not isinstance(kind, str)}


def _size_text(count: int | None) -> str | bool:
    """Return a size as text: 2**31 -> "2GiB". None gives True: typer shows the default as it is."""
    unit = next((name for name in ("TiB", "GiB", "MiB", "KiB") if count and count % UNITS[name.upper()] == 0), "")
    return count is None or f"{count // UNITS[unit.upper()]}{unit}"


# Wide enough that rows written to a pipe are never cut.
PIPE_WIDTH = 10_000


def printable(text: object) -> str:
    """Return a text that is safe to write to a terminal. Control characters and bytes of file names that are not UTF-8
    are escaped.
    """
    whole = str(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in whole)


def say_error(error: object) -> None:
    """Print an error as a line on standard error."""
    print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)


def say_note(text: object) -> None:
    """Print a note on standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def say(text: object = "", *, end: str = "\n") -> None:
    """Print a line of the result."""
    print(printable(text), end=end, flush=True)


def print_json(value: Any) -> None:
    # Escaped, so that any terminal encoding and any lone surrogate in a file name can be written.
    print(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False), flush=True)


def print_result(as_json: bool, value: dict[str, Any], line: str) -> None:
    """Print a result as JSON, or as a line of text."""
    if as_json:
        print_json(value)
    else:
        say(line)


def print_rows(rows: Iterable[tuple[str, object]], width: int) -> None:
    """Print names in a column of this width, each followed by its value; "-" for None."""
    for name, value in rows:
        say(f"{name:<{width}}{'-' if value is None else value}")


def bars() -> AbstractContextManager[Callable[[ProgressEvent], None] | None]:
    """Return a context that shows progress bars if standard error is a terminal."""
    return progress_bars() if on_terminal() else nullcontext()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # the error that rich handles: `command` ends the program


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table. Columns whose name begins with ">" are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable("" if cell is None else cell)) for cell in row))
    console = _Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)


def on_terminal() -> bool:
    """Return whether standard error is a terminal, and progress may be shown."""
    return sys.stderr.isatty()


def seconds_text(seconds: float) -> str:
    """Return a duration as text: 0.0123 -> "12.3 ms"."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
