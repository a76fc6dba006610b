"""Office documents, e-books, notebooks and tables as Markdown, most of them by markitdown."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import lru_cache, partial
from html import escape
from io import BytesIO, StringIO
from itertools import islice, repeat
from pathlib import Path
from typing import IO, Any, NamedTuple
from xml.etree.ElementTree import Element, ParseError, fromstring, iterparse
from zipfile import BadZipFile, ZipFile

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, read_bytes, storable
from ragcache.ingest.text_blocks import first_heading
from ragcache.store.places import Place, edited
from ragcache_documents.html import decode_page, markdown_of, stated_title

TEXTUAL = (".ipynb", ".csv")
# What converters write of a file without text: comments that number slides, and names of sheets.
_MADE = re.compile(r"(?s:<!--.*?-->)|^## .*$", re.MULTILINE)


def read_converted(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data, suffix = read_bytes(path), path.suffix.lower()
    if suffix in TEXTUAL:
        data = decode(data, path).encode()
    found = _Converted("", *_csv(data.decode(), path)) if suffix == ".csv" else _convert(data, suffix, path)
    text, places = edited(found.text, found.places, storable)
    if not any(map(str.isalnum, _MADE.sub("", text))):
        raise ReaderError(path, "there is no text in it")
    # A workbook's headings are names of its sheets.
    other = document_id.rpartition("/")[2] if suffix == ".xlsx" else first_heading(text)
    yield Document(document_id, text, title=found.title or other, source=document_id, places=places)


class _Converted(NamedTuple):
    """title: where the file states one. places: of slides, sheets and rows"""

    title: str
    text: str
    places: list[Place]


def _convert(data: bytes, suffix: str, path: Path) -> _Converted:
    """Raises ReaderError."""
    try:
        from markitdown import MissingDependencyException, StreamInfo, converters
    except ImportError as error:
        raise ReaderError(path, _lacking(suffix)) from error
    try:
        if suffix == ".xlsx":
            return _Converted(_own_title(data, suffix), *_sheets(data))
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
    places = list(_slides(text)) if suffix == ".pptx" else []
    return _Converted(_own_title(data, suffix) or " ".join(storable(made.title or "").split()), text, places)


# Titles: of Office documents in their own words, and as their properties state them.

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_TITLE = "{http://purl.org/dc/elements/1.1/}title"
_OFFICE_SUFFIXES = (".docx", ".pptx", ".xlsx")


def _own_title(data: bytes, suffix: str) -> str:
    """Return the title of an Office document: its first paragraph in Word's style Title, or its properties' title; ""
    where there is neither, or none that can be read."""
    if suffix not in _OFFICE_SUFFIXES:
        return ""
    try:
        with ZipFile(BytesIO(data)) as archive:
            names = archive.namelist()
            shown = _title_paragraph(archive) if "word/styles.xml" in names else ""
            has_properties = not shown and "docProps/core.xml" in names
            stated = fromstring(archive.read("docProps/core.xml")).findtext(_TITLE) if has_properties else ""
    except (BadZipFile, KeyError, ParseError):  # of an optional part: the text was read
        return ""
    return shown or stated_title(stated or "")


def _title_paragraph(archive: ZipFile) -> str:
    styles = fromstring(archive.read("word/styles.xml")).iter(f"{_WORD}style")
    # Names of built-in styles are English; their ids are in the language of the program.
    ids = {style.get(f"{_WORD}styleId") for style in styles if _value(style.find(f"{_WORD}name")).lower() == "title"}
    if not ids:
        return ""
    with archive.open("word/document.xml") as document:
        for _event, element in iterparse(document):
            if element.tag == f"{_WORD}p":
                if _value(element.find(f"{_WORD}pPr/{_WORD}pStyle")) in ids:
                    words = "".join(run.text or "" for run in element.iter(f"{_WORD}t"))
                    if title := " ".join(storable(words).split()):
                        return title
                element.clear()
    return ""


def _value(element: Element | None) -> str:
    return "" if element is None else element.get(f"{_WORD}val", "")


# Slides, as markitdown numbers them in comments.

_SLIDE = re.compile(r"^<!-- Slide number: (\d+) -->$\s*", re.MULTILINE)


def _slides(text: str) -> Iterator[Place]:
    """Yield the places of the slides. Their comments belong to none: one may stand at the end of the passage before."""
    number = 0
    for mark in _SLIDE.finditer(text):
        if int(mark[1]) == number + 1:  # another one was written on a slide
            number += 1
            yield Place(mark.start(), {})
            if mark.end() < len(text):
                yield Place(mark.end(), {"slide": number})


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
MAX_NAME = 100


def _sheets(data: bytes) -> tuple[str, list[Place]]:
    """Return each sheet as a table under its name. A formula is the value that was saved with it, or stands itself."""
    from openpyxl import load_workbook

    load = partial(load_workbook, read_only=True)
    book = load(BytesIO(data), data_only=True)
    written = load(BytesIO(data)).worksheets if _has_formulas(data) else repeat(None)
    tables, places, start = list[str](), list[Place](), 0
    for sheet, formulas in zip(book.worksheets, written, strict=False):
        rows = _rows(sheet)
        if formulas is not None:
            both = zip(rows, _rows(formulas), strict=True)
            rows = ([text if value is None else value for value, text in zip(*pair, strict=True)] for pair in both)
        heading, table, named = f"## {sheet.title}\n", _table(rows), {"sheet": storable(sheet.title)[:MAX_NAME]}
        tables.append(f"{heading}{table.text}".rstrip("\n"))
        places += [Place(start, named), *table.places(start + len(heading), named)]
        start += len(tables[-1]) + len("\n\n")
    return "\n\n".join(tables), places


def _rows(sheet: Any) -> Iterator[Sequence[object]]:
    sheet.reset_dimensions()  # what the file states may be any number
    return ([_cell_value(cell) for cell in row] for row in sheet.iter_rows())


def _cell_value(cell: Any) -> object:
    """Return the cell's value, as text where its number format or its kind says more than the value."""
    from openpyxl.worksheet.formula import ArrayFormula, DataTableFormula

    value = cell.value
    if isinstance(value, ArrayFormula):
        return value.text
    if isinstance(value, DataTableFormula):
        inputs = (value.r1, value.r2) if value.dt2D else (value.r1, "") if value.dtr else ("", value.r1)
        return f"=TABLE({','.join(inputs)})"
    if isinstance(value, timedelta):
        minutes, seconds = divmod(round(value.total_seconds()), 60)
        hours = f"{minutes // 60}:{minutes % 60:02}"
        return f"{hours}:{seconds:02}" if seconds else hours
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _formatted(value, cell.number_format)
    return value


# Parts of a number format: currencies ([$EUR-407]), colours and conditions in brackets, quoted and escaped text, space
# as wide as a character, filling, digits, and letters that mean themselves. Dates and fractions have others.
_FORMAT = re.compile(
    r'\[\$(?P<currency>[^\]-]*)[^\]]*\]|\[[^\]]*\]|"(?P<quoted>[^"]*)"|\\(?P<escaped>.)|_.|\*.'
    r"|(?P<digit>[0#?.])|(?P<grouping>,(?=[#?,]*[0#?]))|(?P<letter>[^\w@/,])"
)


@lru_cache
def _format_parts(section: str) -> tuple[tuple[str, bool], ...]:
    """Return the texts of a number format, each with whether it is a digit; () where the format is another kind's."""
    parts = []
    at = 0
    while at < len(section):
        part = _FORMAT.match(section, at)
        if part is None:
            return ()
        text = part["currency"] or part["quoted"] or part["escaped"] or part["digit"] or part["letter"] or ""
        parts.append((text, bool(part["digit"])))
        at = part.end()
    digits = "".join(text for text, is_digit in parts if is_digit)
    return tuple(parts) if re.fullmatch(r"[0#?]*\.?[0#?]+|[0#?]+\.", digits) else ()


def _formatted(number: float, format: str | None) -> object:
    """Return the number with the zeros, decimals, per cent, currency and unit that its format states, without grouping
    of thousands; the number itself where the format states none of them."""
    sections = (format or "General").split(";")
    own = 1 if number < 0 else 2 if number == 0 else 0
    section = sections[own] if own < len(sections) else sections[0]
    parts = _format_parts(section)
    if not parts:
        return number
    places, point, decimals = "".join(text for text, is_digit in parts if is_digit).partition(".")
    value = Decimal(f"{abs(number):.15g}") * (100 if ("%", False) in parts else 1)
    rounded = value.quantize(Decimal(1).scaleb(-len(decimals)), ROUND_HALF_UP, Context(prec=1000))
    whole, _, fraction = f"{rounded:f}".partition(".")
    whole = whole.rjust(places.count("0"), "0")
    fraction = fraction[: decimals.count("0")] + fraction[decimals.count("0") :].rstrip("0")
    out: list[str] = []  # from right to left, as the digits before the point are filled in
    first, is_whole = 0, not point
    for text, is_digit in reversed(parts):
        if not is_digit:
            out.append(text)
        elif text == ".":
            out.append(f".{fraction}" if fraction else "")
            first, is_whole = len(out), True
        elif is_whole:
            out.append(whole[-1:])
            first, whole = len(out), whole[:-1]
    out.insert(first, whole)
    sign = "-" if number < 0 and section is sections[0] else ""
    return sign + "".join(reversed(out)).strip()


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


class _Table(NamedTuple):
    """A table as Markdown. rows: the number of the sheet's row that each line is, from 1"""

    text: str
    rows: list[int]

    def places(self, start: int, fields: Mapping[str, str]) -> Iterator[Place]:
        """Yield the places of its rows, one where the numbers do not rise by one. start: of the table in its text"""
        before = 0
        for line, row in zip(self.text.split("\n"), self.rows, strict=False):
            if row != before + 1 or not before:
                yield Place(start, fields, row)
            before = row
            start += len(line) + 1


def _table(rows: Iterable[Sequence[object]]) -> _Table:
    """Return rows as Markdown, the first one as its header, all as wide as the widest; those without text are left
    out."""
    numbered = ((number, [_cell(value) for value in cells]) for number, cells in enumerate(rows, 1))
    written = [(number, row) for number, row in numbered if any(row)]
    width = max((len(row) for _, row in written), default=0)
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for _, row in written]
    numbers = [number for number, _ in written]
    text = "\n".join([*lines[:1], *["|" + " --- |" * width] * bool(lines), *lines[1:]])
    return _Table(text, [*numbers[:1], *numbers])  # the line below the header is the header's


def _csv(text: str, path: Path) -> tuple[str, list[Place]]:
    """Return the list as a table. Its separator is the one that its first line states, or by which most rows are as
    wide as the first, which has several cells: with semicolons, 3,50 is a number."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a cell may be as long as the text
    stated = re.match(r"sep=(.)\n", text)
    text = text[stated.end() :] if stated else text

    def fit(separator: str) -> tuple[float, int]:
        widths = [len(row) for row in islice(csv.reader(StringIO(text), delimiter=separator), TOLD_BY) if row]
        columns = widths[0] if widths else 0
        return (widths.count(columns) / len(widths), columns) if columns > 1 else (0, 0)

    try:
        separator = stated[1] if stated else max(SEPARATORS, key=fit)
        table = _table(csv.reader(StringIO(text), delimiter=separator))
    except (csv.Error, TypeError) as error:
        raise ReaderError(path, f"the file is no list of values ({error})") from error
    return table.text, list(table.places(0, {}))


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
            content = fromstring(archive.read("content.xml"))
            page = _page(content)
            meta = fromstring(archive.read("meta.xml")) if "meta.xml" in archive.namelist() else Element("meta")
    except (BadZipFile, KeyError, ParseError, RuntimeError, ValueError) as error:
        raise ReaderError(path, f"the file is damaged or encrypted ({type(error).__name__}: {error})") from error
    title = _styled_title(content) or stated_title(meta.findtext(f".//{_TITLE}", ""))
    named, text = markdown_of(page, path)
    yield Document(document_id, text, title=title or named, source=document_id)


def _styled_title(content: Element) -> str:
    """Return the first paragraph in the style Title, or in one made from it; "" for none."""
    parents = {
        style.get(f"{_STYLE}name"): style.get(f"{_STYLE}parent-style-name") for style in content.iter(f"{_STYLE}style")
    }
    for paragraph in content.iter(f"{_TEXT}p"):
        style = paragraph.get(f"{_TEXT}style-name")
        if "Title" in (style, parents.get(style)) and (title := " ".join("".join(paragraph.itertext()).split())):
            return title
    return ""


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
