"""Spreadsheets and lists as Markdown tables.

markitdown is not used for them: it takes each column of a sheet for a single type, so that an empty cell becomes NaN, 3
becomes 3.0 and the text "NA" becomes empty, and it takes every list as separated by commas.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import lru_cache, partial
from io import BytesIO, StringIO
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

from ragcache.errors import ReaderError
from ragcache.ingest.readers.plain import storable
from ragcache.store.places import Place

_FORMULA = re.compile(rb"<f[ />]")
PIECE = 1 << 20  # bytes of a sheet's file that are searched at once
SEPARATORS = ",;\t|"
# First rows of a list by which its separator is found.
TOLD_BY = 50
MAX_NAME = 100
MOST_COLUMNS = 1 << 14


def workbook_tables(data: bytes) -> tuple[str, list[Place]]:
    """Return each visible sheet as a table under its name, and the places of sheets and rows in this text.

    A formula's cell shows the value that was saved with it, or else the formula itself.
    """
    from openpyxl import load_workbook

    load = partial(load_workbook, read_only=True)
    book = load(BytesIO(data), data_only=True)
    written = load(BytesIO(data)).worksheets if _has_formulas(data) else repeat(None)
    tables, places, start = list[str](), list[Place](), 0
    for sheet, formulas in zip(book.worksheets, written, strict=False):
        if sheet.sheet_state != "visible":
            continue
        layout = _Layout.of(data, sheet)
        rows = layout.shown(_rows(sheet))
        if formulas is not None:
            both = zip(rows, layout.shown(_rows(formulas)), strict=True)
            rows = ([text if value is None else value for value, text in zip(*pair, strict=True)] for pair in both)
        heading, table, named = f"## {sheet.title}\n", _table(rows), {"sheet": storable(sheet.title)[:MAX_NAME]}
        tables.append(f"{heading}{table.text}".rstrip("\n"))
        places += [Place(start, named), *table.places(start + len(heading), named)]
        start += len(tables[-1]) + len("\n\n")
    return "\n\n".join(tables), places


# A row or columns that are hidden, and a range of merged cells, as the sheet's file states them.
_LAYOUT = re.compile(
    rb"""<(?:\w+:)?(?:(?P<what>row|col)\b(?=[^>]*\shidden=["'](?:1|true))[^>]*>|mergeCell\b[^>]*\bref=["'](?P<ref>[^"']+))"""
)
_ATTRIBUTE = rb"""\s%s=["'](\d+)"""


class _Layout(NamedTuple):
    """How a sheet shows its cells. merged: last row of each merged range, by the range's first row and column"""

    hidden_rows: set[int]
    hidden_columns: set[int]
    merged: dict[tuple[int, int], int]

    @classmethod
    def of(cls, data: bytes, sheet: Any) -> _Layout:
        from openpyxl.utils.cell import range_boundaries

        layout = cls(set(), set(), {})
        for found in _matches(data, sheet._worksheet_path, _LAYOUT):
            if found["ref"]:
                column, row, _, last_row = range_boundaries(found["ref"].decode("ascii", "replace"))
                if last_row > row:
                    layout.merged[row, column] = last_row
                continue
            numbers = {name: re.search(_ATTRIBUTE % name, found[0]) for name in (b"r", b"min", b"max")}
            if numbers[b"r"]:
                layout.hidden_rows.add(int(numbers[b"r"][1]))
            elif numbers[b"min"] and numbers[b"max"]:
                layout.hidden_columns.update(
                    range(int(numbers[b"min"][1]), min(int(numbers[b"max"][1]), MOST_COLUMNS) + 1)
                )
        return layout

    def shown(self, rows: Iterable[Sequence[object]]) -> Iterator[Sequence[object]]:
        """Yield the rows, hidden ones empty, with the value of a merged cell in each row that it covers."""
        below: dict[int, tuple[int, object]] = {}
        for number, row in enumerate(rows, 1):
            values = list(row)
            for column in range(1, len(values) + 1):
                last, held = below.get(column, (0, None))
                if number <= last and values[column - 1] is None:
                    values[column - 1] = held
                if (end := self.merged.get((number, column))) is not None:
                    below[column] = (end, values[column - 1])
            if number in self.hidden_rows:
                yield []
            else:
                yield [value for column, value in enumerate(values, 1) if column not in self.hidden_columns]


def _matches(data: bytes, path: str, pattern: re.Pattern[bytes]) -> Iterator[re.Match[bytes]]:
    """Yield a pattern's matches in a file of the workbook, which is read in pieces that end with a tag."""
    with ZipFile(BytesIO(data)) as archive, archive.open(path.lstrip("/")) as sheet:
        before = b""
        for piece in iter(partial(sheet.read, PIECE), b""):
            text = before + piece
            cut = text.rfind(b">") + 1
            yield from pattern.finditer(text, 0, cut)
            before = text[cut:][-PIECE:]


def _rows(sheet: Any) -> Iterator[Sequence[object]]:
    sheet.reset_dimensions()  # the stated dimensions may be wrong
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
# as wide as a character, filling, digits, and other characters that are shown as they are. A format of dates or
# fractions has parts that match none of these.
_FORMAT = re.compile(
    r'\[\$(?P<currency>[^\]-]*)[^\]]*\]|\[[^\]]*\]|"(?P<quoted>[^"]*)"|\\(?P<escaped>.)|_.|\*.'
    r"|(?P<digit>[0#?.])|(?P<grouping>,(?=[#?,]*[0#?]))|(?P<letter>[^\w@/,])"
)


@lru_cache
def _format_parts(section: str) -> tuple[tuple[str, bool], ...]:
    """Return the parts of a number format, each with whether it is a digit; () if the format is of another kind."""
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
    """Return the number with the zeros, decimals, per cent, currency and unit of its format, without grouping of
    thousands.

    Returns the number itself if the format states none of these.
    """
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
        names = [name for name in archive.namelist() if name.startswith("xl/worksheets/")]
    return any(True for name in names for _ in _matches(data, name, _FORMULA))


class _Table(NamedTuple):
    """A table as Markdown. rows: the number of the sheet's row that each line is, from 1"""

    text: str
    rows: list[int]

    def places(self, start: int, fields: Mapping[str, str]) -> Iterator[Place]:
        """Yield the places of the table's rows where the numbers do not rise by 1. start: of the table in its text"""
        before = 0
        for line, row in zip(self.text.split("\n"), self.rows, strict=False):
            if row != before + 1 or not before:
                yield Place(start, fields, row)
            before = row
            start += len(line) + 1


def _table(rows: Iterable[Sequence[object]]) -> _Table:
    """Return rows as Markdown, the first as header, all as wide as the widest; rows without text are left out."""
    numbered = ((number, [_cell(value) for value in cells]) for number, cells in enumerate(rows, 1))
    written = [(number, row) for number, row in numbered if any(row)]
    width = max((len(row) for _, row in written), default=0)
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for _, row in written]
    numbers = [number for number, _ in written]
    text = "\n".join([*lines[:1], *["|" + " --- |" * width] * bool(lines), *lines[1:]])
    return _Table(text, [*numbers[:1], *numbers])  # the line below the header is the header's


def list_table(text: str, path: Path) -> tuple[str, list[Place]]:
    """Return the list as a table, and the places of its rows. Raises ReaderError if it is not a list of values.

    The separator is the character that a first line `sep=;` states. Without such a line it is the character by which
    most of the first rows have as many cells as the first row, and more than one cell: between semicolons, 3,50 is then
    a number.
    """
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
    """Return a cell's text as the sheet shows it: with at most 15 digits, and a bare date without a time."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")
