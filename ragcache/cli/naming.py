"""Documents by the names that people type: ids, files, folders, and patterns of sources."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ragcache.cli.options import option

if TYPE_CHECKING:
    from ragcache import Library

Sources = Annotated[
    list[str] | None,
    option("--source", "By source: a file, a folder with all in it, or a pattern with * and ?; may be repeated."),
]


def by_source(given: Sequence[str] | None) -> dict[str, Any] | None:
    """A filter for the documents of these sources, as they are and as paths from the current directory."""
    return _any_of("source", (pattern for one in given or () for pattern in _patterns(one)))


def by_id(given: Sequence[str] | None) -> dict[str, Any] | None:
    """A filter for these document ids."""
    return _any_of("document_id", given or ())


def all_of(*filters: dict[str, Any] | None) -> dict[str, Any] | None:
    wanted = [one for one in filters if one]
    return {"$and": wanted} if wanted else None


def document_ids(kb: Library, given: Iterable[str]) -> dict[str, str]:
    """The ids that these names stand for: ids of documents and passages as they are, files by their paths."""
    from ragcache.ingest.readers import file_id

    named = {}
    for name in given:
        file = file_id(name) if "\0" not in name else name
        stored = kb.document(name) is not None or kb.document(file) is None
        named[name] = name if stored else file
    return named


def _patterns(source: str) -> list[str]:
    if "\0" in source:
        return [_literal(source)]
    if os.path.lexists(source) or not _is_pattern(source):
        from ragcache.ingest.readers import file_id

        path = _literal(file_id(source))
        # The file; its records, whose source ends in a line number; what is in the folder.
        return [_literal(source), path, f"{path}:*", f"{path.rstrip('/')}/*"]
    parts = Path(source).parts
    fixed = next(rank for rank, part in enumerate(parts) if _is_pattern(part))
    folder = _literal(os.path.realpath(Path(*parts[:fixed])))
    return [source, "/".join([folder.rstrip("/"), *parts[fixed:]])]


def _is_pattern(text: str) -> bool:
    return "*" in text or "?" in text


def _literal(text: str) -> str:
    """The pattern that only this text matches."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)


def _any_of(field: str, patterns: Iterable[str]) -> dict[str, Any] | None:
    parts = [{field: {"$glob": pattern}} for pattern in dict.fromkeys(patterns)]
    return {"$or": parts} if parts else None
