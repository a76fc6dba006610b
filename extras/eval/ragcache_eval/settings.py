"""Names with settings, as the command line writes them: "registry:hops=1,passages=8"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

from ragcache.errors import ConfigError

S = TypeVar("S")


def split_settings(text: str, separator: str = ",") -> dict[str, str]:
    """Parse "hops=1,passages=8" as a dictionary. Raises ConfigError for a part that is not name=value."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(separator)):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{part!r} is no setting; write name=value")
        found[name.strip()] = value.strip()
    return found


def make(kind: type[S], given: dict[str, str], what: str) -> S:
    """Make an instance of a dataclass from its settings as text; lists are separated by "/".

    Raises ConfigError naming the setting that is unknown, missing or of the wrong type.
    """
    hints = get_type_hints(kind)
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"{what} has no setting {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
    missing = [n for n, f in known.items() if n not in given and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise ConfigError(f"{what} needs the setting {missing[0]}; write {what}:{missing[0]}=...")
    return kind(**{name: _value(text, hints[name], f"{what}:{name}") for name, text in given.items()})


def _value(text: str, hint: Any, where: str) -> Any:
    try:
        if hint in (int, float, str):
            return hint(text)
        if hint == tuple[int, ...]:
            return tuple(int(part) for part in text.split("/"))
    except ValueError as error:
        raise ConfigError(f"{where}={text} is no number; write one, or several with / between them") from error
    return text


def check_setting(where: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{where}={value} is unknown; choose one of {', '.join(choices)}")
