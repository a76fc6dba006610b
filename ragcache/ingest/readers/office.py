"""Office documents, e-books, notebooks and tables, turned into Markdown by markitdown, sheets by openpyxl (extra
`documents`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from io import BytesIO
from pathlib import Path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, read_bytes, storable
from ragcache.ingest.text_blocks import first_heading

TEXTUAL = (".ipynb", ".csv")
# What converters write of a file without text: comments that number slides, and names of sheets.
_MADE = re.compile(r"(?s:<!--.*?-->)|^## .*$", re.MULTILINE)


def read_converted(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data, suffix = read_bytes(path), path.suffix.lower()
    if suffix in TEXTUAL:
        data = decode(data, path).encode()
    title, text = _convert(data, suffix, path)
    if not any(map(str.isalnum, _MADE.sub("", text))):
        raise ReaderError(path, "there is no text in it")
    yield Document(document_id, text, title=title or first_heading(text), source=document_id)


def _convert(data: bytes, suffix: str, path: Path) -> tuple[str, str]:
    """Title, where the file states one, and text. Raises ReaderError."""
    lacking = f'reading {suffix} files takes the extra documents; run: pip install "ragcache-kv[documents]"'
    try:
        from markitdown import MissingDependencyException, StreamInfo, converters
    except ImportError as error:
        raise ReaderError(path, lacking) from error
    try:
        if suffix == ".xlsx":
            return "", storable(_sheets(data))
        # The converter is named, not guessed from the bytes: that would load a model.
        converter = getattr(converters, f"{suffix[1:].capitalize()}Converter")()
        made = converter.convert(BytesIO(data), StreamInfo(extension=suffix, charset="utf-8"))
    except (MissingDependencyException, ModuleNotFoundError) as error:
        raise ReaderError(path, lacking) from error
    except MemoryError:
        raise
    except Exception as error:  # the parsers below raise any kind
        raise ReaderError(path, f"the file is damaged or encrypted ({type(error).__name__}: {error})") from error
    text = storable(made.markdown).replace("\r\n", "\n").replace("\r", "\n")
    return " ".join(storable(made.title or "").split()), text


# Spreadsheets. markitdown reads them as columns of one type each: an empty cell is NaN, 3 is 3.0, and "NA" nothing.


def _sheets(data: bytes) -> str:
    """Each sheet as a table under its name. A formula is the value that was saved with it."""
    from openpyxl import load_workbook

    book = load_workbook(BytesIO(data), read_only=True, data_only=True)
    tables = []
    for sheet in book.worksheets:
        sheet.reset_dimensions()  # what the file states may be any number
        rows = [row for cells in sheet.iter_rows(values_only=True) if any(row := [_cell(value) for value in cells])]
        width = max(map(len, rows), default=0)
        lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in rows]
        tables.append("\n".join([f"## {sheet.title}", *lines[:1], *["|" + " --- |" * width] * bool(lines), *lines[1:]]))
    return "\n\n".join(tables)


def _cell(value: object) -> str:
    """Text of a cell as the sheet shows it: 15 digits, and no time of a bare date."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")
