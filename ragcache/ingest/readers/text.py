"""Plain text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.base import decode, read_bytes


def read_text(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    yield Document(document_id, decode(read_bytes(path), path), source=document_id)
