"""Checks that both databases can hold a text or JSON value. Few imports, for processes that read files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ragcache.errors import MetadataError

MAX_DEPTH = 64


def check_metadata(where: str, metadata: object) -> None:
    """Raise MetadataError, naming `where`, if metadata is not a JSON object that both databases can hold."""
    if not isinstance(metadata, dict):
        raise MetadataError(f"{where}: metadata is a {type(metadata).__name__}; give a JSON object")
    problem = _json_problem(metadata, 0)
    if problem:
        raise MetadataError(
            f"{where}: metadata holds {problem}; it is a JSON object: string keys; strings, finite numbers, booleans, "
            "null, lists, objects"
        )


def text_problem(text: str) -> str | None:
    """Name the reason why a database refuses the text, or return None. PostgreSQL takes no NUL, and neither database
    takes half of a surrogate pair."""
    if "\0" in text:
        return "a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair"
    return None


def as_values(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """Return any metadata as a JSON object that both databases can hold: other values become text."""
    return {as_text(key): as_text(value) if _json_problem(value, 0) else value for key, value in metadata.items()}


def as_text(value: object) -> str:
    """Return the value as a text that both databases can hold."""
    return str(value).replace("\0", "").encode(errors="replace").decode()


def _json_problem(value: object, depth: int) -> str | None:
    """Name the problem with a value, or return None."""
    if depth > MAX_DEPTH:
        return f"more than {MAX_DEPTH} levels"
    if value is None or isinstance(value, bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return text_problem(value)
    if isinstance(value, list | tuple):
        return next((problem for item in value if (problem := _json_problem(item, depth + 1))), None)
    if isinstance(value, dict):
        return next((problem for pair in value.items() if (problem := _pair_problem(*pair, depth + 1))), None)
    return f"a {type(value).__name__}"


def _pair_problem(key: object, value: object, depth: int) -> str | None:
    if not isinstance(key, str):
        return f"the key {key!r}, no string"
    return text_problem(key) or _json_problem(value, depth)
