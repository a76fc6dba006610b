"""HTML: the visible text as Markdown, by html-to-markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, read_bytes, storable
from ragcache.ingest.text_blocks import MAX_TITLE, first_heading

DROPPED = ["button", "head", "iframe", "nav", "noscript", "script", "select", "style", "svg", "template"]
_DECLARED = re.compile(rb"""(?i)<(?:meta\b[^>]*?charset|\?xml\b[^>]*?encoding)\s*=\s*["']?\s*([\w.:-]+)""")
# Code is unchanged. Elsewhere the converter writes two spaces at a line break, and escapes what a line of Markdown
# would begin a list with: "1\. Opening hours".
_WRITTEN = re.compile(r"(?ms)^[ >]*(?P<fence>`{3,}).*?^[ >]*(?P=fence)$| +$|^(?P<mark>[ >]*\d*)\\(?=[-+.)] )")

# Comments, elements without visible text, the title, and all other tags: one after the other, in linear time. What is
# not closed goes on to the end. An icon that is closed at once (<svg/>) has nothing in it.
_INSIDE_TAG = r"""(?:"[^"]*+"?+|'[^']*+'?+|[^>"'])*+"""
_MARKUP = re.compile(
    rf"""(?isx) <!--.*?(?:-->|\Z)
    | <(?P<name>script|style|svg|math|template|noscript|textarea|iframe)\b{_INSIDE_TAG}(?<!/)>.*?(?:</(?P=name)\b|\Z)
    | <title\b{_INSIDE_TAG}>(?P<title>.*?)(?:</title\b|\Z)
    | <[a-z/!?]{_INSIDE_TAG}(?:>|\Z)"""
)
_NO_TITLE = {"", "untitled", "anonymous", "(anonymous)", "word document", "powerpoint presentation"}
_FILE_TITLE = re.compile(r"Microsoft (Word|Excel|PowerPoint) - ")


def read_html(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    title, text = markdown_of(decode_page(read_bytes(path), path), path)
    if not text:
        raise ReaderError(path, "there is no text in it (only markup)")
    yield Document(document_id, text, title=title, source=document_id)


def markdown_of(page: str, where: Path) -> tuple[str, str]:
    """Title and text of a page. Raises ReaderError where its elements are nested too deeply."""
    from html_to_markdown import ConversionOptions, PreprocessingOptions, WarningKind, convert

    # A width that wraps no line joins those that the source wraps.
    options = ConversionOptions(
        preprocessing=PreprocessingOptions(enabled=False), exclude_selectors=DROPPED, hidden_content="reachable",
        strip_tags=["b", "em", "i", "mark", "strong"], wrap=True, wrap_width=1 << 24, compact_tables=True,
        skip_images=True, extract_metadata=False,
    )  # fmt: skip
    raised: Any = _Raised()  # its protocol wants every method
    made = convert(storable(page), options, raised)
    if any(warning.kind == WarningKind.DEPTH_LIMIT_EXCEEDED for warning in made.warnings):
        raise ReaderError(where, "its elements are nested too deeply")
    text = _WRITTEN.sub(_as_seen, made.content or "").strip()
    return _page_title(page) or first_heading(text), text


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
    """Keeps raised text apart: a power is no further digit, and a footnote's number belongs to no word."""

    def __init__(self) -> None:
        self._linked = ""

    def visit_link(self, _context: Any, address: str, text: str, _title: str) -> dict[str, str]:
        self._linked = text if "#" in address else ""
        return {"custom": text}

    def visit_superscript(self, _context: Any, text: str) -> dict[str, str]:
        if text.startswith("[") or re.fullmatch(r"[^\W\d]{2,}", text.strip()):  # marked already; 1st, 2nd
            return {"custom": text}
        return {"custom": f"[{text}]" if text == self._linked else f"^{text}"}


def decode_page(data: bytes, path: Path) -> str:
    """Decode a page as UTF-8, or in the encoding that it declares.

    A declaration that was read as ASCII cannot mean UTF-16: such a page is UTF-8, as browsers read it (WHATWG, "prescan
    a byte stream").
    """
    found = _DECLARED.search(data[:1024])
    declared = found[1].decode("ascii", "replace") if found else ""
    if declared and not re.fullmatch("utf-?8|utf-?(16|32).*|unicode", declared, re.IGNORECASE):
        try:
            return data.decode(declared)
        except (LookupError, UnicodeDecodeError) as error:
            raise ReaderError(path, f"the page declares the encoding {declared!r}, but is not in it") from error
    return decode(data, path)
