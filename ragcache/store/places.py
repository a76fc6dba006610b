"""Places: the page, slide, sheet and row of its file that a passage was read from.

A reader returns a document's text and, beside it, the places in the file that the text came from, by character offsets.
Each passage's own place is derived from these and stored in its metadata, under the keys that LangChain's and
LlamaIndex's readers use. Texts, and so tokens and KV, are the same with places as without.

| key | value |
|---|---|
| `page` | number of a PDF's page, from 0, as PyPDFLoader has it |
| `page_label` | the page's number as the PDF prints it, a string |
| `slide` | number of a slide, from 1 |
| `sheet` | name of a workbook's sheet |
| `row` | number of a sheet's or list's row, from 1, as spreadsheet programs show it |
| `headings` | titles of the sections that the passage begins in, outermost first |

A passage that spans several pages, slides, sheets or rows has the last one, too: `last_page`, `last_row` and so on.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ragcache.errors import MetadataError
from ragcache.store.json_values import check_metadata

LAST = "last_"
KEYS = tuple(end + key for key in ("page", "page_label", "slide", "sheet", "row") for end in ("", LAST))
"""Names of the metadata fields that give a passage's place in its file, except `headings`."""
MOST_SHOWN = 80  # characters of a name


class Place(NamedTuple):
    """The place in a file of a document's text, from `start` up to the next place.

    start:  offset in the text, in characters
    fields: metadata of a passage from here, such as {"page": 2, "page_label": "3"}
    row:    number of the table's row in the line at `start`; each further line is the next row. 0: not in a table
    """

    start: int
    fields: Mapping[str, str | int]
    row: int = 0


def check_places(where: str, text: str, places: Sequence[Place]) -> None:
    """Raise MetadataError, naming `where`, unless the places lie in `text`, in order, and their fields are metadata."""
    for place in places:
        check_metadata(where, dict(place.fields))
    starts = [place.start for place in places]
    if starts and (starts[0] < 0 or starts[-1] > len(text) or any(start >= after for start, after in pairwise(starts))):
        raise MetadataError(
            f"{where}: its places do not begin at rising offsets of its {len(text)} characters; give them in order, "
            "each offset once"
        )


def edited(text: str, places: Sequence[Place], edit: Callable[[str], str]) -> tuple[str, Sequence[Place]]:
    """Return the edited text and the places in it. The edit must treat each character by itself."""
    new = edit(text)
    if not places or new == text:
        return new, places
    moved, start, before = [], 0, 0
    for place in places:
        start += len(edit(text[before : place.start]))
        before = place.start
        moved.append(place._replace(start=start))
    return new, moved


class PlaceIndex:
    """A lookup of the places that passages of a text span."""

    def __init__(self, text: str, places: Sequence[Place]) -> None:
        self._text = text
        self._places = places
        self._starts = [place.start for place in places]
        counts_rows = any(place.row for place in places)
        self._line_ends = [end.start() for end in re.finditer("\n", text)] if counts_rows else []

    def between(self, start: int, end: int) -> dict[str, str | int]:
        """Return the metadata of the passage text[start:end]."""
        if not self._places:
            return {}
        passage = self._text[start:end]
        start, end = end - len(passage.lstrip()), start + len(passage.rstrip())
        first: dict[str, str | int] = {}
        last: dict[str, str | int] = {}
        begin = max(0, bisect_right(self._starts, start) - 1)
        for rank in range(begin, bisect_left(self._starts, end)):
            place = self._places[rank]
            fields = dict(place.fields)
            if place.row:
                stop = self._starts[rank + 1] if rank + 1 < len(self._starts) else end
                row = place.row - bisect_left(self._line_ends, place.start)
                first.setdefault("row", row + bisect_left(self._line_ends, max(start, place.start)))
                last["row"] = row + bisect_left(self._line_ends, min(end, stop) - 1)
            first = fields | first
            last |= fields
        return first | {LAST + key: value for key, value in last.items() if value != first[key]}


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
