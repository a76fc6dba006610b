"""HTML: the visible text as Markdown-like blocks, so that the chunker sees headings, lists and code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bs4 import BeautifulSoup
from bs4.dammit import EncodingDetector
from bs4.element import NavigableString, PreformattedString, Tag

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, fenced, read_bytes

DROPPED = ["script", "style", "nav", "noscript", "template", "svg", "iframe", "head", "button", "select"]
HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
STRUCK = ("del", "s", "strike")
BLOCKS = {
    "address", "article", "aside", "blockquote", "body", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption",
    "figure", "footer", "form", "header", "hr", "html", "li", "main", "ol", "p", "pre", "section", "summary", "table",
    "tr", "ul", *HEADINGS,
}  # fmt: skip


def read_html(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    try:
        soup = BeautifulSoup(_decode(read_bytes(path), path), "html.parser")
    except RecursionError as error:
        raise ReaderError(path, "its elements are nested too deeply") from error
    heading = soup.find("h1")
    title = " ".join((soup.title or heading or soup.new_tag("p")).get_text().split())
    for tag in soup.find_all(DROPPED):
        tag.decompose()
    text = _render(soup)
    if not text:
        raise ReaderError(path, "there is no text in it (only markup)")
    yield Document(document_id, text, title=title, source=document_id)


def _decode(data: bytes, path: Path) -> str:
    """UTF-8, or the encoding that the page declares. A declaration that was read as ASCII does not stand in UTF-16:
    such a page is UTF-8, as browsers read it (WHATWG, "prescan a byte stream")."""
    declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    if declared and not re.fullmatch("utf-?8|utf-?(16|32).*|unicode", declared, re.IGNORECASE):
        try:
            return data.decode(declared)
        except (LookupError, UnicodeDecodeError) as error:
            raise ReaderError(path, f"the page declares the encoding {declared!r}, but is not in it") from error
    return decode(data, path)


def _render(soup: BeautifulSoup) -> str:
    """Blocks separated by blank lines; list items and table rows by line ends."""
    parts: list[str] = []
    # (node, whether its children are done): children are pushed in reverse, then the closing mark.
    stack: list[tuple[object, bool]] = [(soup, False)]
    while stack:
        node, done = stack.pop()
        if isinstance(node, Tag):
            parts.append(_close(node) if done else _open(node))
            if not done and node.name != "pre":
                stack.append((node, True))
                stack += [(child, False) for child in reversed(node.contents)]
        elif isinstance(node, NavigableString) and not isinstance(node, PreformattedString):
            parts.append(re.sub(r"\s+", " ", str(node)))
    text = "".join(parts)
    # Outside of code, spaces around line ends mean nothing.
    pieces = re.split(r"(\x01[^\x02]*\x02)", text)
    text = "".join(piece if piece.startswith("\x01") else re.sub(r" *\n[ \n]*", _line_ends, piece) for piece in pieces)
    return re.sub(r"[\x01\x02]", "", text).strip()


def _line_ends(match: re.Match[str]) -> str:
    return "\n\n" if match.group().count("\n") > 1 else "\n"


def _open(tag: Tag) -> str:
    if tag.name == "pre":
        code = re.sub(r"[\x01\x02]", "", tag.get_text()).strip("\n")
        return f"\n\n\x01{fenced(code)}\x02\n\n"
    if tag.name == "li":
        return "\n- "
    if tag.name in ("tr", "br"):
        return "\n"
    if tag.name in STRUCK:
        return "~~"
    if tag.name == "sup":
        return _raised(tag)[0]
    return "\n\n" + HEADINGS.get(tag.name, "") if tag.name in BLOCKS else ""


def _raised(tag: Tag) -> tuple[str, str]:
    """What stands around a raised text: a power is no further digit, and a footnote's number belongs to no word."""
    text = tag.get_text().strip()
    if tag.find("a"):
        return ("", "") if text.startswith("[") else ("[", "]")
    return ("", "") if re.fullmatch(r"[^\W\d]{2,}", text) else ("^", "")  # 1st, 2nd


def _close(tag: Tag) -> str:
    if tag.name in ("td", "th"):
        return " | " if tag.find_next_sibling(["td", "th"]) else ""
    if tag.name in STRUCK:
        return "~~"
    if tag.name == "sup":
        return _raised(tag)[1]
    if tag.name in ("li", "tr"):
        return " "  # the next one begins with a line end
    return "\n\n" if tag.name in BLOCKS else ""
