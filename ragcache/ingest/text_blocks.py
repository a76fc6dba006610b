"""The blocks of a text: headings, paragraphs, code, list items, rows of tables.

Plain text is parsed as Markdown too, because blocks only mark good places to cut and never change a character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from markdown_it import MarkdownIt

from ragcache.models.deadline import LIMIT

# Characters that are parsed at once, and the larger number for a block that is longer than WINDOW.
WINDOW = 1 << 17
MAX_WINDOW = 1 << 19
# Most characters of a heading's title or a table's header, which every chunk below it repeats.
MAX_TITLE = 1000


class Block(NamedTuple):
    """A block of a text: text[start:end], which includes the blank lines after the block.

    level: 1-6 for a heading, 0 otherwise
    title: a heading's words
    is_prose: whether to cut between sentences rather than lines
    header: for a table's row, start and end of the table's header; None for a table's first row, whose block includes
        the header, and for other blocks
    """

    start: int
    end: int
    level: int
    title: str
    is_prose: bool
    header: tuple[int, int] | None = None


def split_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of `text`, which has no carriage returns, in order. Together they cover all of it.

    A long text is parsed a window at a time, since the parser takes many times the memory of the text. The last block
    of a window may continue, so the next window begins with it. The blocks are the same as if the whole text were
    parsed at once, unless a single block is longer than MAX_WINDOW.

    Raises CancelledError and TimedOutError under `deadline.limited`.
    """
    parser = MarkdownIt("commonmark").enable("table")
    # Only block structure is needed, and inline rules are slow on one enormous line.
    parser.core.ruler.disable(["inline", "text_join"])
    parser.block.ruler.disable("reference")
    start, size = 0, WINDOW
    header: tuple[int, int] | None = None  # of the table that continues at `start`
    while start < len(text):
        LIMIT.get().check()
        end = text.find("\n", start + size) + 1 or len(text)
        found = _parse(parser, text, start, end, header)
        resume = end
        if end < len(text) and len(found) > 1:
            last = found.pop()
            resume, header = last.start, last.header
            if header and header[1] - header[0] > MAX_TITLE:
                header = None  # too long to parse again with each window: the rest of the table becomes prose
        elif end < len(text) and size < MAX_WINDOW:
            size = MAX_WINDOW
            continue
        yield from _tile(found, start, resume)
        start, size = resume, WINDOW


def first_heading(text: str) -> str:
    """Return the title of the first heading, or "" if the text has no heading."""
    return next((block.title for block in split_blocks(text) if block.level), "")


def _parse(parser: MarkdownIt, text: str, begin: int, end: int, header: tuple[int, int] | None) -> list[Block]:
    """Return the blocks that begin in text[begin:end], without their ends, which `_tile` sets.

    header: if text[begin:end] begins with further rows of a table, start and end of the table's header
    """
    part = text[begin:end]
    offsets = [begin, *(begin + match.end() for match in re.finditer("\n", part))]
    if header:  # two lines: the names of the columns, and the line between them and the rows
        part, offsets = text[slice(*header)] + part, [header[0], header[0], *offsets]
    found: list[Block] = []
    top = 0  # line of the last table
    for token in parser.parse(part):
        if token.type == "inline" and token.level == 1 and token.map and found and found[-1].level:
            found[-1] = found[-1]._replace(title=token.content[:MAX_TITLE])
        if not token.map or token.nesting < 0:
            continue
        line = token.map[0]
        top = line if token.type == "table_open" else top
        goes_on = header is not None and top == 0
        is_row = token.type == "tr_open" and token.level == 2 and line >= top + (2 if goes_on else 3)
        is_block = token.level == 0 and not token.type.endswith("list_open") and not (header and line == 0)
        if is_row:
            columns = header if goes_on else (offsets[top], offsets[top + 2])
            found.append(Block(offsets[line], end, 0, "", False, columns))
        elif is_block or (token.type == "list_item_open" and token.level == 1):
            level = int(token.tag[1]) if token.type == "heading_open" else 0
            found.append(Block(offsets[line], end, level, "", token.type == "paragraph_open"))
    return found


def _tile(found: list[Block], begin: int, end: int) -> Iterator[Block]:
    """Yield the blocks with their ends set, so that they cover text[begin:end].

    Text that no token covers belongs to the block before it, or at the beginning to the first block.
    """
    found = found or [Block(begin, end, 0, "", True)]
    starts = [begin, *(block.start for block in found[1:]), end]
    for block, (start, stop) in zip(found, pairwise(starts), strict=True):
        yield block._replace(start=start, end=stop)
