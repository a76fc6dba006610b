"""Parts that all commands share: option groups, and errors as one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer

from ragcache.cli.output import say_error
from ragcache.errors import ConfigError, RagCacheError

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
