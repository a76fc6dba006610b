"""Office documents, e-books, notebooks and tables as Markdown, most of them by markitdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, read_bytes, storable
from ragcache.ingest.text_blocks import first_heading
from ragcache.store.places import Place, edited
from ragcache_documents.html import decode_page, markdown_of
from ragcache_documents.sheets import list_table, workbook_tables
from ragcache_documents.shown import as_shown
from ragcache_documents.titles import document_title

TEXTUAL = (".ipynb", ".csv")
_SLIDE = re.compile(r"^<!-- Slide number: (\d+) -->$\s*", re.MULTILINE)
# Text that converters write even for an empty file: comments that number slides, and names of sheets.
_MADE = re.compile(r"(?s:<!--.*?-->)|^## .*$", re.MULTILINE)


def read_converted(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data, suffix = read_bytes(path), path.suffix.lower()
    if suffix in TEXTUAL:
        data = decode(data, path).encode()
    found = _Converted("", *list_table(data.decode(), path)) if suffix == ".csv" else _convert(data, suffix, path)
    text, places = edited(found.text, found.places, storable)
    if not any(map(str.isalnum, _MADE.sub("", text))):
        raise ReaderError(path, "there is no text in it")
    # A workbook's headings are names of its sheets, so the file's name is the better title.
    other = document_id.rpartition("/")[2] if suffix == ".xlsx" else first_heading(text)
    yield Document(document_id, text, title=found.title or other, source=document_id, places=places)


class _Converted(NamedTuple):
    """A converted document. title: "" if the file states none. places: of slides, sheets and rows"""

    title: str
    text: str
    places: list[Place]


def _convert(data: bytes, suffix: str, path: Path) -> _Converted:
    """Convert a document to Markdown. Raises ReaderError if it is damaged or encrypted, or a package is missing."""
    try:
        from markitdown import MissingDependencyException, StreamInfo, converters
    except ImportError as error:
        raise ReaderError(path, missing_extra(suffix)) from error
    try:
        if suffix == ".xlsx":
            return _Converted(document_title(data, suffix), *workbook_tables(data))
        # The converter is named, not guessed from the bytes: that would load a model.
        converter = getattr(converters, f"{suffix[1:].capitalize()}Converter")()
        if suffix in (".docx", ".epub"):
            converter._html_converter = _Pages(path)
        read = as_shown(data, suffix) if suffix in (".docx", ".pptx") else data
        made = converter.convert(BytesIO(read), StreamInfo(extension=suffix, charset="utf-8"))
    except (MissingDependencyException, ModuleNotFoundError) as error:
        raise ReaderError(path, missing_extra(suffix)) from error
    except (MemoryError, ReaderError):
        raise
    except Exception as error:  # the parsers below raise any kind
        raise ReaderError(path, f"the file is damaged or encrypted ({type(error).__name__}: {error})") from error
    text = storable(made.markdown).replace("\r\n", "\n").replace("\r", "\n")
    places = list(_slide_places(text)) if suffix == ".pptx" else []
    return _Converted(document_title(data, suffix) or " ".join(storable(made.title or "").split()), text, places)


def _slide_places(text: str) -> Iterator[Place]:
    """Yield the places of the slides, which markitdown numbers in comments.

    A comment's own place has no fields, because it may end the previous passage.
    """
    number = 0
    for mark in _SLIDE.finditer(text):
        if int(mark[1]) == number + 1:  # any other mark was written on a slide
            number += 1
            yield Place(mark.start(), {})
            if mark.end() < len(text):
                yield Place(mark.end(), {"slide": number})


def missing_extra(suffix: str) -> str:
    return f'reading {suffix} files takes the extra documents; run: pip install "ragcache-kv[documents]"'


class _Pages:
    """Replaces markitdown's own HTML converter, so that pages inside documents are read as HTML files are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def convert_string(self, page: str, **_options: Any) -> Any:
        from markitdown import DocumentConverterResult

        title, text = markdown_of(page, self._path)
        return DocumentConverterResult(text, title=title)

    def convert(self, page: IO[bytes], _info: Any, **_options: Any) -> Any:
        return self.convert_string(decode_page(page.read(), self._path))
