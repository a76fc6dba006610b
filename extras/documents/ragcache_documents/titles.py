"""Titles of Office documents, from their text or from their properties."""

from __future__ import annotations

from io import BytesIO
from xml.etree.ElementTree import Element, ParseError, fromstring, iterparse
from zipfile import BadZipFile, ZipFile

from ragcache.ingest.readers.plain import storable
from ragcache_documents.html import stated_title

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
TITLE = "{http://purl.org/dc/elements/1.1/}title"
_OFFICE_SUFFIXES = (".docx", ".pptx", ".xlsx")


def document_title(data: bytes, suffix: str) -> str:
    """Return the title of an Office document, or "" if none can be read.

    The title is its first paragraph in Word's style Title, or its properties' title.
    """
    if suffix not in _OFFICE_SUFFIXES:
        return ""
    try:
        with ZipFile(BytesIO(data)) as archive:
            names = archive.namelist()
            shown = _title_paragraph(archive) if "word/styles.xml" in names else ""
            has_properties = not shown and "docProps/core.xml" in names
            stated = fromstring(archive.read("docProps/core.xml")).findtext(TITLE) if has_properties else ""
    except (BadZipFile, KeyError, ParseError):  # an optional part is damaged, but the text was read
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
