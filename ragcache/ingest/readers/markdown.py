"""Markdown: the text is kept unchanged, its first heading is the title, and YAML front matter becomes metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.front_matter import parse_front_matter
from ragcache.ingest.readers.plain import decode, read_bytes
from ragcache.ingest.text_blocks import first_heading

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?P<lines>(?:.*\n)*?)(?:---|\.\.\.)[ \t]*(?:\n|\Z)")


def read_markdown(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    metadata, text = split_front_matter(decode(read_bytes(path), path))
    if not text.strip():
        raise ReaderError(path, "there is no text below its front matter")
    title = metadata.get("title")
    named = first_heading(text) if title is None or isinstance(title, dict | list) else str(title)
    yield Document(document_id, text, metadata, title=named, source=document_id)


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """Return the fields of the front matter and the text below it.

    A block without any field is not front matter: its dashes are thematic breaks, so it stays in the text.
    """
    match = _FRONT_MATTER.match(text)
    metadata = {} if match is None else parse_front_matter(match["lines"])
    return ({}, text) if match is None or not metadata else (metadata, text[match.end() :])
