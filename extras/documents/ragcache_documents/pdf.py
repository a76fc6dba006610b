"""PDF: the text layer, page by page, with wrapped lines joined again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from pypdf import PageObject, PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import read_bytes, storable
from ragcache.store.places import Place
from ragcache_documents.html import stated_title

# A line is taken as wrapped if the next line's first word would not have fitted into this share of the page's widest
# line. Widths are counted in characters, so the share leaves room for proportional type. After the end of a sentence it
# leaves none: an extra line end does no harm there, but two paragraphs joined into one would.
WRAP_SHARE = 0.85
WRAP_SHARE_AFTER_SENTENCE = 1.0
# The widest line counts as this many characters at least: shorter lines were not wrapped. Neither were those of a page
# on which no line begins with a small letter: a list of prices, addresses or times.
FULL_LINE = 40
BETWEEN_PAGES = "\n\n"
# Flags of a form's fields and of their boxes on the page.
_PASSWORD, _HIDDEN = 1 << 13, 1 << 1
_MOST_NESTED = 32
_NEW_BLOCK = re.compile(r"\s*([-*•‣◦–]|\d+[.)])\s")
MAX_LABEL = 100


def read_pdf(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    if not read_bytes(path).lstrip()[:1024].count(b"%PDF-"):
        raise ReaderError(path, "this is not a PDF (no %PDF- header)")
    try:
        reader = PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise ReaderError(path, "the PDF is encrypted with a password; save it without one")
        pages = [_page_text(page) for page in reader.pages]
        labels = _labels(reader, len(pages))
        title = stated_title(str((reader.metadata.title if reader.metadata else None) or ""))
    except (ReaderError, MemoryError):
        raise
    except (FileNotDecryptedError, DependencyError) as error:
        raise ReaderError(path, f"the PDF is encrypted ({error}); save it without encryption") from error
    except Exception as error:
        # A damaged PDF makes pypdf raise errors of any class.
        raise ReaderError(path, f"the PDF is damaged ({type(error).__name__}: {error})") from error
    written = [number for number, page in enumerate(pages) if page.strip()]
    if not written:
        raise ReaderError(path, f"there is no text in the PDF's {len(pages)} pages (scanned?); run OCR on it first")
    starts = accumulate((len(pages[number]) + len(BETWEEN_PAGES) for number in written), initial=0)
    places = [
        Place(start, {"page": number, "page_label": labels[number]})
        for number, start in zip(written, starts, strict=False)
    ]
    text = BETWEEN_PAGES.join(pages[number] for number in written)
    yield Document(document_id, text, title=title, source=document_id, places=places)


def _page_text(page: PageObject) -> str:
    text = join_wrapped_lines(storable(page.extract_text()))
    return "\n".join(part for part in (text, *_filled_in(page)) if part)


def _filled_in(page: PageObject) -> Iterator[str]:
    """Yield `name: value` for each field of a form on the page that was filled in and is neither hidden nor secret."""
    for annotation in page.annotations or ():
        box = annotation.get_object()
        if box.get("/Subtype") != "/Widget" or int(box.get("/F", 0)) & _HIDDEN:
            continue
        kind, value = _of_field(box, "/FT"), _of_field(box, "/V")
        name = _of_field(box, "/TU") or _of_field(box, "/T")
        if kind == "/Btn":  # its value is the state of a tick box or radio button
            value = box.get("/AS", value)
            value = None if value in (None, "/Off") else str(value).lstrip("/")
        if kind not in ("/Tx", "/Ch", "/Btn") or value in (None, "") or int(_of_field(box, "/Ff") or 0) & _PASSWORD:
            continue
        values = value if isinstance(value, list) else [value]
        yield storable(f"{name or 'field'}: {', '.join(str(one) for one in values)}")


def _of_field(box: Any, key: str) -> Any:
    """Return a field's own value of a key, or that of a field around it; None if there is no value."""
    for _ in range(_MOST_NESTED):
        if key in box:
            value = box[key].get_object()
            return value.get_data().decode("latin-1") if hasattr(value, "get_data") else value
        if "/Parent" not in box:
            break
        box = box["/Parent"].get_object()
    return None


def _labels(reader: PdfReader, num_pages: int) -> list[str]:
    """Return the PDF's labels of its pages: their numbers from 1, unless it states other readable labels."""
    try:
        stated = [storable(label).strip()[:MAX_LABEL] for label in reader.page_labels]
    except MemoryError:
        raise
    except Exception:  # of any class, as above; the pages may still be good
        stated = []
    return [label or str(number) for number, label in enumerate(stated + [""] * num_pages, 1)][:num_pages]


def join_wrapped_lines(page: str) -> str:
    """Return a page's text with wrapped lines joined into a line per paragraph, and hyphenated words joined."""
    lines = [line.rstrip() for line in page.splitlines()]
    widest = max([FULL_LINE, *map(len, lines)])
    if not any(line[:1].isalpha() and not line[:1].isupper() for line in map(str.strip, lines)):
        return "\n".join(lines)
    joined: list[str] = []
    for position, line in enumerate(lines):
        if joined and _is_wrapped(lines[position - 1], line, widest):
            joined[-1] = _join(joined[-1], line.strip())
        else:
            joined.append(line)
    return "\n".join(joined)


def _is_wrapped(line: str, following: str, widest: int) -> bool:
    if not line.strip() or not following.strip() or _NEW_BLOCK.match(following):
        return False
    share = WRAP_SHARE_AFTER_SENTENCE if line.endswith((".", "!", "?", ":")) else WRAP_SHARE
    return len(line) + 1 + len(following.split()[0]) > share * widest


def _join(line: str, following: str) -> str:
    if re.search(r"[a-zß-öø-ÿ]-\Z", line) and following[:1].islower():
        return line[:-1] + following
    return f"{line} {following}"
