"""The place of a passage in words, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragcache.store.places import LAST, MOST_SHOWN


def place_text(metadata: Mapping[str, Any], title: str = "") -> str:
    """Return a passage's place in words, such as "p. 3", "slides 4–5" or "sheet Q1, rows 2–14". Without these, return
    its headings, leaving out a first heading that is the document's title. The metadata may come from any source:
    values of other types than readers produce are ignored."""
    page = _span(metadata, "page_label", "p. ", "pp. ")
    slide = _span(metadata, "slide", "slide ", "slides ")
    sheet = _span(metadata, "sheet", "sheet ", "sheets ")
    # Rows in two sheets do not form a range.
    row = "" if LAST + "sheet" in metadata else _span(metadata, "row", "row ", "rows ")
    return ", ".join(filter(None, (page, slide, sheet, row))) or _heading_text(metadata.get("headings"), title)


def _span(metadata: Mapping[str, Any], key: str, singular: str, several: str) -> str:
    first, last = (metadata.get(name) for name in (key, LAST + key))
    expected = str if key in ("page_label", "sheet") else int
    if not isinstance(first, expected) or isinstance(first, bool):
        return ""
    if not isinstance(last, expected):
        return f"{singular}{str(first)[:MOST_SHOWN]}"
    return f"{several}{str(first)[:MOST_SHOWN]}\u2013{str(last)[:MOST_SHOWN]}"


def _heading_text(headings: Any, title: str) -> str:
    if not isinstance(headings, list) or not all(isinstance(heading, str) for heading in headings):
        return ""
    shown = headings[1:] if headings and headings[0] == title else headings
    return " \u203a ".join(heading[:MOST_SHOWN] for heading in shown)
