"""The blocks of a text: headings, paragraphs, code, list items.

Plain text is read as Markdown too: the blocks only say where a cut is good, they never change a character.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from markdown_it import MarkdownIt


class Block(NamedTuple):
    """text[start:end] with the blank lines behind it. level: 1-6 of a heading, 0 otherwise; title: its words.
    is_prose: cut between sentences rather than lines."""

    start: int
    end: int
    level: int
    title: str
    is_prose: bool


def split_blocks(text: str) -> list[Block]:
    """Blocks in order; they tile `text`, which has no carriage returns."""
    parser = MarkdownIt("commonmark")
    # Only block structure is needed, and inline rules are slow on one enormous line.
    parser.core.ruler.disable(["inline", "text_join"])
    parser.block.ruler.disable("reference")
    offsets = [0, *(match.end() for match in re.finditer("\n", text))]
    starts: list[tuple[int, int, bool]] = []
    titles: dict[int, str] = {}
    for token in parser.parse(text):
        if token.type == "inline" and token.level == 1 and token.map and starts and starts[-1][1]:
            titles[starts[-1][0]] = token.content
        is_block = token.level == 0 and not token.type.endswith("list_open") and token.nesting >= 0
        if token.map and (is_block or (token.type == "list_item_open" and token.level == 1)):
            level = int(token.tag[1]) if token.type == "heading_open" else 0
            starts.append((offsets[token.map[0]], level, token.type == "paragraph_open"))
    return _tile(text, starts, titles)


def _tile(text: str, starts: list[tuple[int, int, bool]], titles: dict[int, str]) -> list[Block]:
    if not starts:
        return [Block(0, len(text), 0, "", True)] if text else []
    # What no token covers belongs to the block before it, or to the first one.
    begins = [0, *(start for start, _, _ in starts[1:])]
    ends = [*begins[1:], len(text)]
    return [
        Block(begin, end, level, titles.get(start, ""), is_prose)
        for begin, end, (start, level, is_prose) in zip(begins, ends, starts, strict=True)
    ]
