"""The blocks of a text: headings, paragraphs, code, list items, rows of tables.

Plain text is read as Markdown too: the blocks only say where a cut is good, they never change a character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from markdown_it import MarkdownIt

from ragcache.models.deadline import LIMIT

# Characters that are parsed together, and where one block alone is longer than that.
WINDOW = 1 << 17
MAX_WINDOW = 1 << 19
# Longest title of a heading, or header of a table, in characters: every chunk below it carries it.
MAX_TITLE = 1000


class Block(NamedTuple):
    """text[start:end] with the blank lines behind it. level: 1-6 of a heading, 0 otherwise; title: its words.
    is_prose: cut between sentences rather than lines. header: where that of a row's table is; None for all others, and
    for a table's first row, which is one block with it."""

    start: int
    end: int
    level: int
    title: str
    is_prose: bool
    header: tuple[int, int] | None = None


def split_blocks(text: str) -> Iterator[Block]:
    """Blocks in order; they tile `text`, which has no carriage returns.

    A long text is parsed a window at a time: what the parser makes of a line takes many times its size. The last block
    of a window may go on, so the next window begins with it. Blocks are those of the whole text parsed at once, unless
    a single one is longer than MAX_WINDOW.

    Raises CancelledError and TimedOutError within `limits.limited`.
    """
    parser = MarkdownIt("commonmark").enable("table")
    # Only block structure is needed, and inline rules are slow on one enormous line.
    parser.core.ruler.disable(["inline", "text_join"])
    parser.block.ruler.disable("reference")
    start, size = 0, WINDOW
    header: tuple[int, int] | None = None  # of the table that goes on at `start`
    while start < len(text):
        LIMIT.get().check()
        end = text.find("\n", start + size) + 1 or len(text)
        found = _parse(parser, text, start, end, header)
        resume = end
        if end < len(text) and len(found) > 1:
            last = found.pop()
            resume, header = last.start, last.header
            if header and header[1] - header[0] > MAX_TITLE:
                header = None  # parsed again with each window, so what is left of such a table is prose
        elif end < len(text) and size < MAX_WINDOW:
            size = MAX_WINDOW
            continue
        yield from _tile(found, start, resume)
        start, size = resume, WINDOW


def first_heading(text: str) -> str:
    """The words of the first heading; "" where there is none."""
    return next((block.title for block in split_blocks(text) if block.level), "")


def _parse(parser: MarkdownIt, text: str, begin: int, end: int, header: tuple[int, int] | None) -> list[Block]:
    """Blocks that begin in text[begin:end], which goes on with a table's rows where there is a header; their ends are
    left open."""
    part = text[begin:end]
    offsets = [begin, *(begin + match.end() for match in re.finditer("\n", part))]
    if header:  # two lines: the names of the columns, and what separates them from the rows
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
    """Close the gaps: text that no token covers belongs to the block before it, or to the first one."""
    found = found or [Block(begin, end, 0, "", True)]
    starts = [begin, *(block.start for block in found[1:]), end]
    for block, (start, stop) in zip(found, pairwise(starts), strict=True):
        yield block._replace(start=start, end=stop)
