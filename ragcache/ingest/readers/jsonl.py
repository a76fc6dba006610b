"""JSON lines: each line is a document.

Fields: `text` or `content` (required), `id`, `title`, `metadata` (an object), `source`. All other fields become
metadata unchanged; if `metadata` has the same key, its value is used. A title that the text does not begin with is put
above the text as a heading: passages are often cut from a page that named its subject only in the title.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document, headed
from ragcache.ingest.readers.plain import decode, printable, unreadable

FIELDS = ("text", "content", "id", "title", "metadata", "source")


def read_jsonl(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    """Yield a document for each line. A line that is not a document is yielded as its error."""
    records = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    records += 1
                    yield _record(line, f"{printable(path)}:{number}", document_id, number)
    except OSError as error:
        raise ReaderError(path, unreadable(error)) from error
    if not records:
        raise ReaderError(path, "the file is empty")


def _record(line: bytes, where: str, file_id: str, number: int) -> Document | ReaderError:
    try:
        return _document(json.loads(decode(line, where)), where, file_id, number)
    except ReaderError as error:
        return error
    except (ValueError, RecursionError) as error:
        return ReaderError(where, f"the line is not JSON ({error})")


def _words(value: Any) -> str:
    """Return a string or number as text, and "" for an object, a list, a boolean or null."""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _document(fields: Any, where: str, file_id: str, number: int) -> Document:
    if not isinstance(fields, dict):
        raise ReaderError(where, "the line is not a JSON object")
    text = next((fields[name] for name in ("text", "content") if name in fields), None)
    if not isinstance(text, str) or not text.strip():
        raise ReaderError(where, "the record has no text: give it a string field 'text' or 'content'")
    metadata = fields.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ReaderError(where, "'metadata' is not a JSON object")
    id = fields.get("id")
    if id is not None and (isinstance(id, bool) or not isinstance(id, str | int)):
        raise ReaderError(where, "'id' is neither a string nor a whole number")
    title = " ".join(_words(fields.get("title")).split())
    metadata = {name: value for name, value in fields.items() if name not in FIELDS} | metadata
    source = _words(fields.get("source")) or f"{file_id}:{number}"
    return Document(
        f"{file_id}#{number}" if id in (None, "") else str(id), headed(title, text), metadata, title, source
    )
