"""Source code: the text becomes a code block, and the file's name its title."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, fenced, read_bytes


def read_code(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    # Fenced, since otherwise a comment that begins with # would be a heading.
    text = fenced(decode(read_bytes(path), path).strip("\n"), path.suffix[1:].lower())
    yield Document(document_id, text + "\n", title=document_id.rpartition("/")[2], source=document_id)
