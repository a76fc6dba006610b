"""HTML: the visible text as Markdown, by html-to-markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, decode_stated, read_bytes, storable
from ragcache.ingest.text_blocks import MAX_TITLE, first_heading

# The last two selectors match drawings of a formula that the page also states in MathML.
DROPPED = [
    *("button", "head", "iframe", "nav", "noscript", "script", "select", "style", "svg", "template"),
    *(".katex-html", "mjx-math[aria-hidden=true]"),
]
_DECLARED = re.compile(rb"""(?i)<(?:meta\b[^>]*?charset|\?xml\b[^>]*?encoding)\s*=\s*["']?\s*([\w.:-]+)""")
# Matches a code block, to leave it unchanged; elsewhere, the two spaces that the converter writes at a line break, and
# its escape where Markdown would take the beginning of a line for a list: "1\. Opening hours".
_WRITTEN = re.compile(r"(?ms)^[ >]*(?P<fence>`{3,}).*?^[ >]*(?P=fence)$| +$|^(?P<mark>[ >]*\d*)\\(?=[-+.)] )")

# Matches a comment, an element without visible text, the title or any other tag, in linear time over a page. A comment
# or element that is not closed reaches to the page's end. An icon that is closed at once (<svg/>) counts as a tag.
_INSIDE_TAG = r"""(?:"[^"]*+"?+|'[^']*+'?+|[^>"'])*+"""
_MARKUP = re.compile(
    rf"""(?isx) <!--.*?(?:-->|\Z)
    | <(?P<name>script|style|svg|math|template|noscript|textarea|iframe)\b{_INSIDE_TAG}(?<!/)>.*?(?:</(?P=name)\b|\Z)
    | <title\b{_INSIDE_TAG}>(?P<title>.*?)(?:</title\b|\Z)
    | <[a-z/!?]{_INSIDE_TAG}(?:>|\Z)"""
)
_CELLS = re.compile(rf"(?i)<(?P<closes>/?)(?P<name>table|tr|td|th)(?=[\s/>]){_INSIDE_TAG}>")
_SPAN, _WIDTH = (re.compile(rf"""(?i)\s{name}span\s*=\s*["']?(\d{{1,5}})["']?""") for name in ("row", "col"))
_MOST_ROWS, _MOST_COLUMNS = 1000, 100
_NO_TITLE = {"", "untitled", "anonymous", "(anonymous)", "word document", "powerpoint presentation"}
_FILE_TITLE = re.compile(r"Microsoft (Word|Excel|PowerPoint) - ")


def read_html(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    title, text = markdown_of(decode_page(read_bytes(path), path), path)
    if not text:
        raise ReaderError(path, "there is no text in it (only markup)")
    yield Document(document_id, text, title=title, source=document_id)


def markdown_of(page: str, where: Path) -> tuple[str, str]:
    """Return the title of a page, or else its first heading, and its text as Markdown.

    Raises ReaderError, with the path `where`, if its elements are nested too deeply.
    """
    from html_to_markdown import ConversionOptions, PreprocessingOptions, WarningKind, convert

    # Wrapping at a width that no line reaches joins the lines that the source wraps.
    options = ConversionOptions(
        preprocessing=PreprocessingOptions(enabled=False), exclude_selectors=DROPPED, hidden_content="reachable",
        strip_tags=["b", "em", "i", "mark", "strong"], wrap=True, wrap_width=1 << 24, compact_tables=True,
        skip_images=True, extract_metadata=False,
    )  # fmt: skip
    raised: Any = _Raised()  # the protocol of visitors demands all methods
    made = convert(_filled_down(storable(page)), options, raised)
    if any(warning.kind == WarningKind.DEPTH_LIMIT_EXCEEDED for warning in made.warnings):
        raise ReaderError(where, "its elements are nested too deeply")
    text = _WRITTEN.sub(_as_seen, made.content or "").strip()
    return _page_title(page) or first_heading(text), text


def _filled_down(page: str) -> str:
    """Return the page with the text of each cell that spans rows repeated in each of these rows.

    Only texts of up to MAX_TITLE characters are repeated; below a longer text the cells are empty.
    """
    if not _SPAN.search(page):
        return page
    out, done = list[str](), 0
    tables: list[_Table] = []
    for tag in _CELLS.finditer(page):
        name, closes = tag["name"].lower(), bool(tag["closes"])
        out.append(page[done : tag.start()])
        done = tag.end()
        if name == "table":
            if closes and tables:
                out += tables.pop().end_row(page, tag.start())
            elif not closes:
                tables.append(_Table())
        elif tables and name == "tr":
            out += tables[-1].end_row(page, tag.start())
        elif tables:
            tables[-1].end_cell(page, tag.start())
            if not closes:
                out += tables[-1].begin_cell(tag)
        out.append(_SPAN.sub("", tag[0]) if tables and name in ("td", "th") else tag[0])
    return "".join([*out, page[done:]])


class _Table:
    """State of a table while its tags are read: the current cell, and by column the cells of earlier rows that reach
    down into the current row.
    """

    def __init__(self) -> None:
        self._below: dict[int, tuple[int, str]] = {}
        self._column = self._width = self._start = 0
        self._rows, self._is_open, self._is_row = 1, False, False

    def begin_cell(self, tag: re.Match[str]) -> Iterator[str]:
        """Begin a cell, and yield the cells that reach down from earlier rows directly before it."""
        self._is_row = True
        yield from self._from_above()
        spans = (_SPAN.search(tag[0]), _WIDTH.search(tag[0]))
        self._rows, self._width = (min(int(one[1]) or _MOST_ROWS, _MOST_ROWS) if one else 1 for one in spans)
        self._start, self._is_open = tag.end(), True

    def end_cell(self, page: str, end: int) -> None:
        if not self._is_open:
            return
        text = page[self._start : end] if end - self._start <= MAX_TITLE else ""
        for column in range(self._column, self._column + min(self._width, _MOST_COLUMNS)):
            if self._rows > 1:
                self._below[column] = (self._rows - 1, text)
        self._column += self._width
        self._is_open = False

    def end_row(self, page: str, end: int) -> Iterator[str]:
        """End the row, and yield the cells that reach down from earlier rows after its last cell."""
        self.end_cell(page, end)
        if self._is_row:
            yield from self._from_above()
        self._column, self._is_row = 0, False

    def _from_above(self) -> Iterator[str]:
        while (held := self._below.pop(self._column, None)) is not None:
            rows, text = held
            if rows > 1:
                self._below[self._column] = (rows - 1, text)
            self._column += 1
            yield f"<td>{text}</td>"


def _page_title(page: str) -> str:
    """Return the words of the page's own title, "" if it has none.

    Text in comments, scripts, icons and attributes is not a title.
    """
    found = (match["title"] for match in _MARKUP.finditer(page) if match["title"] is not None)
    return " ".join(storable(unescape(next(found, "")[:MAX_TITLE])).split())


def stated_title(title: str) -> str:
    """Return a file's stated title on a single line; "" for the defaults that programs write."""
    title = " ".join(storable(title).split())
    return "" if title.lower() in _NO_TITLE or _FILE_TITLE.match(title) else title


def _as_seen(found: re.Match[str]) -> str:
    return found[0] if found["fence"] else found["mark"] or ""


class _Raised:
    """Visitor that marks superscripts: 10^6 must not read as 106, nor a footnote's number as part of a word."""

    def __init__(self) -> None:
        self._linked = ""

    def visit_link(self, _context: Any, address: str, text: str, _title: str) -> dict[str, str]:
        self._linked = text if "#" in address else ""
        return {"custom": text}

    def visit_superscript(self, _context: Any, text: str) -> dict[str, str]:
        if text.startswith("[") or re.fullmatch(r"[^\W\d]{2,}", text.strip()):  # marked already, or the end of 1st, 2nd
            return {"custom": text}
        return {"custom": f"[{text}]" if text == self._linked else f"^{text}"}


def decode_page(data: bytes, path: Path) -> str:
    """Decode a page as UTF-8, or in the encoding that it declares.

    A declaration that can be read as ASCII cannot mean UTF-16: a page that declares UTF-16 or UTF-32 this way is UTF-8,
    as browsers read it (WHATWG, "prescan a byte stream"). Raises ReaderError if the page is not in its encoding.
    """
    found = _DECLARED.search(data[:1024])
    declared = found[1].decode("ascii", "replace") if found else ""
    if declared and not re.fullmatch("utf-?8|utf-?(16|32).*|unicode", declared, re.IGNORECASE):
        try:
            return decode_stated(data, declared, path)
        except (LookupError, UnicodeDecodeError) as error:
            raise ReaderError(path, f"the page declares the encoding {declared!r}, but is not in it") from error
    return decode(data, path)
