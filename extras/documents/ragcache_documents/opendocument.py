"""OpenDocument text and RTF."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from html import escape
from io import BytesIO
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, fromstring
from zipfile import BadZipFile, ZipFile

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import read_bytes, storable
from ragcache.ingest.text_blocks import MAX_TITLE
from ragcache_documents.html import markdown_of, stated_title
from ragcache_documents.office import missing_extra
from ragcache_documents.titles import TITLE

_ODF = "{urn:oasis:names:tc:opendocument:xmlns:%s:1.0}"
_OFFICE, _STYLE, _TABLE, _TEXT = (_ODF % name for name in ("office", "style", "table", "text"))
_TAGS = {
    "p": "p", "list": "ul", "list-item": "li", "table": "table", "table-row": "tr", "table-cell": "td",
    "covered-table-cell": "td", "a": "a", "line-break": "br",
}  # fmt: skip
MOST_REPEATED = 64
_HIDDEN = "hidden"
_LEFT_OUT = ("tracked-changes", "annotation")  # deleted text, and remarks


def read_odt(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data = read_bytes(path)
    try:
        with ZipFile(BytesIO(data)) as archive:
            content = fromstring(archive.read("content.xml"))
            _fill_down(content)
            page = _page(content)
            meta = fromstring(archive.read("meta.xml")) if "meta.xml" in archive.namelist() else Element("meta")
    except (BadZipFile, KeyError, ParseError, RuntimeError, ValueError) as error:
        raise ReaderError(path, f"the file is damaged or encrypted ({type(error).__name__}: {error})") from error
    title = _styled_title(content) or stated_title(meta.findtext(f".//{TITLE}", ""))
    named, text = markdown_of(page, path)
    yield Document(document_id, text, title=title or named, source=document_id)


def _styled_title(content: Element) -> str:
    """Return the first paragraph in the style Title, or in a style derived from it; "" if there is none."""
    parents = {
        style.get(f"{_STYLE}name"): style.get(f"{_STYLE}parent-style-name") for style in content.iter(f"{_STYLE}style")
    }
    for paragraph in content.iter(f"{_TEXT}p"):
        style = paragraph.get(f"{_TEXT}style-name")
        if "Title" in (style, parents.get(style)) and (title := " ".join("".join(paragraph.itertext()).split())):
            return title
    return ""


def _page(content: Element) -> str:
    """Return the text as HTML, so that powers, struck text and tables read like those of pages. Notes come last."""
    marks = {}
    for style in content.iter(f"{_STYLE}style"):
        for look in style.iter(f"{_STYLE}text-properties"):
            is_struck = look.get(f"{_STYLE}text-line-through-style", "none") != "none"
            is_raised = re.match("super|[1-9]", look.get(f"{_STYLE}text-position", ""))
            is_hidden = look.get(f"{_TEXT}display") == "none"
            mark = _HIDDEN if is_hidden else "del" if is_struck else "sup" if is_raised else ""
            marks[style.get(f"{_STYLE}name")] = mark
    notes: list[Element] = []
    page = [_html(content.find(f".//{_OFFICE}text"), marks, notes)]
    for note in notes:  # `_html` appends a note that a note refers to
        body = _html(note.find(f"{_TEXT}note-body"), marks, notes)
        page.append(f"<p>[{_number(note)}] {body.replace('<p>', '', 1)}")
    return "".join(page)


def _html(root: Element | None, marks: dict[str | None, str], notes: list[Element]) -> str:
    """Return an element as HTML, without hidden and deleted text, and append the notes in it to `notes`.

    marks: how a style shows its text, by the style's name: "sup", "del", hidden, or "" for plain text
    """
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
        look = marks.get(node.get(f"{_TEXT}style-name"), "") if name in ("span", "p", "h") else ""
        if (
            name == "note"
            or name in _LEFT_OUT
            or look == _HIDDEN
            or node.get(f"{_TABLE}visibility", "visible") != "visible"
        ):
            continue
        if name in ("s", "tab"):
            out.append(" ")
        tag = f"h{min(6, int(node.get(f'{_TEXT}outline-level', '1')))}" if name == "h" else _TAGS.get(name, "")
        tag = tag or (look if name == "span" else "")
        out.append((f"<{tag}>" if tag else "") + escape(node.text or ""))
        stack.append(f"</{tag}>" if tag and tag != "br" else "")
        for child in reversed(node):
            stack += [escape(child.tail or ""), *[child] * _times(child)]
    return "".join(out)


def _fill_down(content: Element) -> None:
    """Repeat the text of a cell that spans rows in all of its rows."""
    for table in content.iter(f"{_TABLE}table"):
        above: dict[int, tuple[int, Element]] = {}
        for row in table.iter(f"{_TABLE}table-row"):
            column = 0
            for cell in row:
                rows, held = above.pop(column, (0, cell))
                if rows and cell.tag == f"{_TABLE}covered-table-cell" and not len(cell):
                    cell[:] = [deepcopy(child) for child in held]
                else:
                    rows, held = int(cell.get(f"{_TABLE}number-rows-spanned", "1")), cell
                if rows > 1 and sum(map(len, held.itertext())) <= MAX_TITLE:
                    above[column] = (rows - 1, held)
                column += _times(cell)


def _times(cell: Element) -> int:
    """Return how often the cell is repeated: adjacent empty cells are written as a single cell."""
    times = cell.get(f"{_TABLE}number-columns-repeated")
    return 1 if times is None or len(cell) else max(1, min(MOST_REPEATED, int(times)))


def _number(note: Element) -> str:
    return escape(note.findtext(f"{_TEXT}note-citation", ""))


_RTF = re.compile(rb"\\(?P<word>[a-z]+)(?P<value>-?\d*) ?|\\'..|\\[^a-z]|[{}]|[^\\{}]+")
_ON_OFF = {b"deleted", b"v", b"strike", b"super"}


def _as_shown(rtf: bytes) -> bytes:
    """Return the RTF without deleted and hidden text, with raised and struck text marked, and its notes at the end."""
    out, notes = list[bytes](), list[bytes]()
    looks, starts = [frozenset[bytes]()], list[int]()
    ends: dict[int, int] = {}  # where a note began in `out`, by the depth of its group
    for token in _RTF.finditer(rtf):
        said, word = token[0], token["word"]
        if said == b"{":
            looks.append(looks[-1])
            starts.append(len(out))
        elif said == b"}":
            if len(looks) > 1:
                looks.pop()
            start = starts.pop() if starts else 0
            if ends.pop(len(looks), None) is not None:
                notes.append(b"".join(out[start + 1 :]))
                del out[start:]
                out.append(b"{[%d]" % len(notes))
        elif word in _ON_OFF:
            looks[-1] = looks[-1] - {word} if token["value"] == b"0" else looks[-1] | {word}
        elif word in (b"plain", b"nosupersub"):
            looks[-1] = looks[-1] - (_ON_OFF if word == b"plain" else {b"super"})
        elif word == b"footnote":
            ends[len(looks) - 1] = len(out)
            continue
        elif looks[-1] & {b"deleted", b"v"} and (word is None or word in (b"u", b"tab", b"line")):
            continue
        elif word is None and said.strip(b"\r\n") and said[:1] != b"\\":
            mark = b"^" * (b"super" in looks[-1]) + b"~~" * (b"strike" in looks[-1])
            said = mark + said + b"~~" * (b"strike" in looks[-1]) if said.strip() else said
        out.append(said)
    end = len(out) - 1 if out and out[-1] == b"}" else len(out)
    out[end:end] = [b"\\par [%d] %s" % (rank, note) for rank, note in enumerate(notes, 1)]
    return b"".join(out)


def read_rtf(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data = read_bytes(path)
    if not data.lstrip().startswith(b"{\\rtf"):
        raise ReaderError(path, r"this is not RTF (no {\rtf header)")
    try:
        from striprtf.striprtf import rtf_to_text
    except ImportError as error:
        raise ReaderError(path, missing_extra(".rtf")) from error
    data = re.sub(rb"[\x80-\xff]", lambda byte: b"\\'%02x" % ord(byte[0]), data)  # escaped: decoded as the file states
    shown = rtf_to_text(_as_shown(data).decode("ascii"), errors="replace")
    yield Document(document_id, storable(shown).strip(), source=document_id)
