"""Office documents, e-books, notebooks and tables as Markdown, most of them by markitdown."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from html import escape
from io import BytesIO, StringIO
from itertools import islice, repeat
from pathlib import Path
from typing import IO, Any
from xml.etree.ElementTree import Element, ParseError, fromstring
from zipfile import BadZipFile, ZipFile

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, read_bytes, storable
from ragcache.ingest.text_blocks import first_heading
from ragcache_documents.html import decode_page, markdown_of

TEXTUAL = (".ipynb", ".csv")
# What converters write of a file without text: comments that number slides, and names of sheets.
_MADE = re.compile(r"(?s:<!--.*?-->)|^## .*$", re.MULTILINE)


def read_converted(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data, suffix = read_bytes(path), path.suffix.lower()
    if suffix in TEXTUAL:
        data = decode(data, path).encode()
    title, text = ("", storable(_csv(data.decode(), path))) if suffix == ".csv" else _convert(data, suffix, path)
    if not any(map(str.isalnum, _MADE.sub("", text))):
        raise ReaderError(path, "there is no text in it")
    yield Document(document_id, text, title=title or first_heading(text), source=document_id)


def _convert(data: bytes, suffix: str, path: Path) -> tuple[str, str]:
    """Title, where the file states one, and text. Raises ReaderError."""
    try:
        from markitdown import MissingDependencyException, StreamInfo, converters
    except ImportError as error:
        raise ReaderError(path, _lacking(suffix)) from error
    try:
        if suffix == ".xlsx":
            return "", storable(_sheets(data))
        # The converter is named, not guessed from the bytes: that would load a model.
        converter = getattr(converters, f"{suffix[1:].capitalize()}Converter")()
        if suffix in (".docx", ".epub"):
            converter._html_converter = _Pages(path)
        made = converter.convert(BytesIO(data), StreamInfo(extension=suffix, charset="utf-8"))
    except (MissingDependencyException, ModuleNotFoundError) as error:
        raise ReaderError(path, _lacking(suffix)) from error
    except (MemoryError, ReaderError):
        raise
    except Exception as error:  # the parsers below raise any kind
        raise ReaderError(path, f"the file is damaged or encrypted ({type(error).__name__}: {error})") from error
    text = storable(made.markdown).replace("\r\n", "\n").replace("\r", "\n")
    return " ".join(storable(made.title or "").split()), text


def _lacking(suffix: str) -> str:
    return f'reading {suffix} files takes the extra documents; run: pip install "ragcache-kv[documents]"'


class _Pages:
    """Reads the pages that a converter makes as those of the web are read: a power stays apart from its digits."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def convert_string(self, page: str, **_options: Any) -> Any:
        from markitdown import DocumentConverterResult

        title, text = markdown_of(page, self._path)
        return DocumentConverterResult(text, title=title)

    def convert(self, page: IO[bytes], _info: Any, **_options: Any) -> Any:
        return self.convert_string(decode_page(page.read(), self._path))


# Spreadsheets and lists. markitdown reads sheets as columns of one type each: an empty cell is NaN, 3 is 3.0, and "NA"
# nothing; and every list as one with commas.

_FORMULA = re.compile(rb"<f[ />]")
PIECE = 1 << 20
SEPARATORS = ",;\t|"
# Rows that a list's separator is told by.
TOLD_BY = 50


def _sheets(data: bytes) -> str:
    """Each sheet as a table under its name. A formula is the value that was saved with it, or stands itself."""
    from openpyxl import load_workbook

    load = partial(load_workbook, read_only=True)
    book = load(BytesIO(data), data_only=True)
    written = load(BytesIO(data)).worksheets if _has_formulas(data) else repeat(None)
    tables = []
    for sheet, formulas in zip(book.worksheets, written, strict=False):
        rows = _rows(sheet)
        if formulas is not None:
            both = zip(rows, _rows(formulas), strict=True)
            rows = ([text if value is None else value for value, text in zip(*pair, strict=True)] for pair in both)
        tables.append(f"## {sheet.title}\n{_table(rows)}".rstrip("\n"))
    return "\n\n".join(tables)


def _rows(sheet: Any) -> Iterator[Sequence[object]]:
    sheet.reset_dimensions()  # what the file states may be any number
    return iter(sheet.iter_rows(values_only=True))


def _has_formulas(data: bytes) -> bool:
    with ZipFile(BytesIO(data)) as archive:
        for name in archive.namelist():
            if name.startswith("xl/worksheets/"):
                with archive.open(name) as sheet:
                    before = b""
                    for piece in iter(partial(sheet.read, PIECE), b""):
                        if _FORMULA.search(before + piece):
                            return True
                        before = piece[-2:]
    return False


def _table(rows: Iterable[Sequence[object]]) -> str:
    """Rows as Markdown, the first one as its header, all as wide as the widest; those without text are left out."""
    written = [row for cells in rows if any(row := [_cell(value) for value in cells])]
    width = max(map(len, written), default=0)
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in written]
    return "\n".join([*lines[:1], *["|" + " --- |" * width] * bool(lines), *lines[1:]])


def _csv(text: str, path: Path) -> str:
    """The list as a table. Its separator is the one that its first line states, or by which most rows are as wide as
    the first, which has several cells: with semicolons, 3,50 is a number."""
    stated = re.match(r"sep=(.)\n", text)
    text = text[stated.end() :] if stated else text

    def fit(separator: str) -> tuple[float, int]:
        widths = [len(row) for row in islice(csv.reader(StringIO(text), delimiter=separator), TOLD_BY) if row]
        columns = widths[0] if widths else 0
        return (widths.count(columns) / len(widths), columns) if columns > 1 else (0, 0)

    try:
        separator = stated[1] if stated else max(SEPARATORS, key=fit)
        return _table(csv.reader(StringIO(text), delimiter=separator))
    except (csv.Error, TypeError) as error:
        raise ReaderError(path, f"the file is no list of values ({error})") from error


def _cell(value: object) -> str:
    """Text of a cell as the sheet shows it: 15 digits, and no time of a bare date."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")


# OpenDocument text and RTF.


_ODF = "{urn:oasis:names:tc:opendocument:xmlns:%s:1.0}"
_OFFICE, _STYLE, _TABLE, _TEXT = (_ODF % name for name in ("office", "style", "table", "text"))
_TAGS = {
    "p": "p", "list": "ul", "list-item": "li", "table": "table", "table-row": "tr", "table-cell": "td",
    "covered-table-cell": "td", "a": "a", "line-break": "br",
}  # fmt: skip
MOST_REPEATED = 64
_LEFT_OUT = ("tracked-changes", "annotation")  # what was deleted, and remarks


def read_odt(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data = read_bytes(path)
    try:
        with ZipFile(BytesIO(data)) as archive:
            page = _page(fromstring(archive.read("content.xml")))
            meta = fromstring(archive.read("meta.xml")) if "meta.xml" in archive.namelist() else Element("meta")
    except (BadZipFile, KeyError, ParseError, RuntimeError, ValueError) as error:
        raise ReaderError(path, f"the file is damaged or encrypted ({type(error).__name__}: {error})") from error
    title = meta.findtext(".//{http://purl.org/dc/elements/1.1/}title")
    named, text = markdown_of(page, path)
    yield Document(document_id, text, title=" ".join((title or named).split()), source=document_id)


def _page(content: Element) -> str:
    """The text as HTML, so that powers, struck text and tables come out as those of pages do. Notes stand last."""
    marks = {}
    for style in content.iter(f"{_STYLE}style"):
        for look in style.iter(f"{_STYLE}text-properties"):
            is_struck = look.get(f"{_STYLE}text-line-through-style", "none") != "none"
            is_raised = re.match("super|[1-9]", look.get(f"{_STYLE}text-position", ""))
            marks[style.get(f"{_STYLE}name")] = "del" if is_struck else "sup" if is_raised else ""
    notes: list[Element] = []
    page = [_html(content.find(f".//{_OFFICE}text"), marks, notes)]
    for note in notes:  # it grows while its bodies are read
        body = _html(note.find(f"{_TEXT}note-body"), marks, notes)
        page.append(f"<p>[{_number(note)}] {body.replace('<p>', '', 1)}")
    return "".join(page)


def _html(root: Element | None, marks: dict[str | None, str], notes: list[Element]) -> str:
    out: list[str] = []
    stack: list[Element | str] = [] if root is None else [root]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            out.append(node)
            continue
        name = node.tag.rpartition("}")[2]
        if name == "note":
            out.append(f"[{_number(node)}]")
            notes.append(node)
        if name == "note" or name in _LEFT_OUT:
            continue
        if name in ("s", "tab"):
            out.append(" ")
        tag = f"h{min(6, int(node.get(f'{_TEXT}outline-level', '1')))}" if name == "h" else _TAGS.get(name, "")
        tag = tag or (marks.get(node.get(f"{_TEXT}style-name"), "") if name == "span" else "")
        out.append((f"<{tag}>" if tag else "") + escape(node.text or ""))
        stack.append(f"</{tag}>" if tag and tag != "br" else "")
        for child in reversed(node):
            stack += [escape(child.tail or ""), *[child] * _times(child)]
    return "".join(out)


def _times(cell: Element) -> int:
    """How often it stands there: empty cells side by side are written as one."""
    times = cell.get(f"{_TABLE}number-columns-repeated")
    return 1 if times is None or len(cell) else max(1, min(MOST_REPEATED, int(times)))


def _number(note: Element) -> str:
    return escape(note.findtext(f"{_TEXT}note-citation", ""))


# Words of control: raised text, struck text to the end of its group, and notes, which striprtf leaves out.
_RAISED = re.compile(r"\\super(?![\w])\s?")
_STRUCK = re.compile(r"(\\strike(?!\w)(?:\\[a-z]+-?\d*)*\s?)([^{}\\]+)")


def read_rtf(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data = read_bytes(path)
    if not data.lstrip().startswith(b"{\\rtf"):
        raise ReaderError(path, r"this is not RTF (no {\rtf header)")
    try:
        from striprtf.striprtf import rtf_to_text
    except ImportError as error:
        raise ReaderError(path, _lacking(".rtf")) from error
    data = re.sub(rb"[\x80-\xff]", lambda byte: b"\\'%02x" % ord(byte[0]), data)  # of the encoding that the file states
    marked = _STRUCK.sub(r"\1~~\2~~", _RAISED.sub("^", data.decode("ascii")))
    marked = marked.replace(r"\footnote", r"\line [note]")
    yield Document(document_id, storable(rtf_to_text(marked, errors="replace")).strip(), source=document_id)
