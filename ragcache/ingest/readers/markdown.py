"""Markdown: the text as it stands; its first heading is the title, and flat front matter becomes metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.base import decode, printable, read_bytes
from ragcache.ingest.structure import split_blocks

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?P<lines>(?:.*\n)*?)(?:---|\.\.\.)[ \t]*(?:\n|\Z)")
_FIELD = re.compile(r"(?P<name>[A-Za-z_][\w-]*):[ \t]+(?P<value>\S.*)")


def read_markdown(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    metadata, text = split_front_matter(decode(read_bytes(path), path))
    if not text.strip():
        raise ReaderError(path, "there is no text below its front matter")
    first = next((block.title for block in split_blocks(text) if block.level), "")
    yield Document(document_id, text, metadata, title=metadata.get("title", first), source=printable(path))


def split_front_matter(text: str) -> tuple[dict[str, str], str]:
    """Fields ("name: value" lines only, values as strings) and the text below. A block in which nothing is a field
    is a thematic break, and stays."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    fields = [_FIELD.fullmatch(line.rstrip()) for line in match["lines"].splitlines()]
    metadata = {field["name"]: field["value"].strip("\"'") for field in fields if field}
    return (metadata, text[match.end() :]) if metadata else ({}, text)
