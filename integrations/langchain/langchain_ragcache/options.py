"""Checks of keyword arguments, which LangChain passes on unchecked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ragcache.errors import ConfigError


def refuse_unknown(where: str, given: Mapping[str, Any] | Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for unknown names, listing these and the known names."""
    names = set(known)
    if unknown := sorted(name for name in given if name not in names):
        raise ConfigError(f"{where} does not take {', '.join(unknown)}; it takes {', '.join(sorted(names))}")
