"""Cut a document into chunks that the language model reads as passages.

A chunk is a contiguous piece of the document of at most `max_tokens` tokens, tokenised alone. Cuts fall, in order of
preference, before headings, between blocks (paragraphs, code blocks, list items), between sentences or lines, between
words, and inside a word only if the word alone is too long. A table is cut between its rows, and each piece begins with
its header. Nothing else is added or lost: the joined chunk texts are the document up to white space, and every chunk
ends with exactly one newline.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ragcache.errors import Config, ConfigError, check_least
from ragcache.ingest.chunk_tokenizer import ChunkTokenizer
from ragcache.ingest.sentences import split_sentences
from ragcache.ingest.text_blocks import MAX_TITLE, Block, split_blocks
from ragcache.models.deadline import LIMIT
from ragcache.store.places import Place, PlaceIndex, edited

T = TypeVar("T")
# A single character and its newline have to fit: a character can take four byte tokens, or more if the tokenizer
# rewrites it.
SMALLEST_MAX_TOKENS = 16
# Limits of a tokenised batch: characters and number of texts.
BATCH_CHARS = 1 << 17
BATCH_TEXTS = 4096
# A text of more characters than both LONG_RUN and `max_tokens` times LONG_TOKEN is divided without being tokenised
# first: no tokenizer averages LONG_TOKEN characters a token.
LONG_RUN = 1 << 16
LONG_TOKEN = 32
# Characters: a longer paragraph is cut into parts of this size before its sentences or words are listed, because each
# string of such a list takes 60 bytes or more.
MAX_BODY = 1 << 21
# Most pieces of a section that are packed together.
MAX_UNITS = 200_000


@dataclass(frozen=True)
class ChunkerConfig(Config, max_tokens="chunk_size", overlap="chunk_overlap"):
    """Sizes of chunks, in tokens.

    max_tokens: most tokens of a chunk, its final newline included
    min_tokens: a section with fewer tokens is joined to the next section
    overlap: most tokens of whole sentences that a piece repeats from the previous piece of the same section
    """

    max_tokens: int = 256
    min_tokens: int = 32
    overlap: int = 0

    def __post_init__(self) -> None:
        check_least("max_tokens", self.max_tokens, SMALLEST_MAX_TOKENS)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(f"min_tokens is {self.min_tokens}; it must lie in 0..max_tokens ({self.max_tokens})")
        if not 0 <= self.overlap <= self.max_tokens // 2:
            raise ConfigError(f"overlap is {self.overlap}; it must lie in 0..max_tokens // 2 ({self.max_tokens // 2})")


class TextChunk(NamedTuple):
    """A piece of a document that the language model reads as a passage.

    text: ends with one newline
    token_ids: ids of the text, tokenised alone
    headings: headings above the chunk that its text does not contain
    metadata: the chunk's own metadata: its place in the file, and the headings of the section that it begins in,
        including those in its text
    """

    text: str
    token_ids: list[int]
    headings: tuple[str, ...]
    metadata: Mapping[str, Any] = MappingProxyType({})

    def embedded_text(self, title: str) -> str:
        """Return the text to embed: the chunk below its document's title and its headings.

        A title or heading that the chunk begins with is left out; each is cut to MAX_TITLE characters.
        """
        above = dict.fromkeys(name[:MAX_TITLE] for name in (title, *self.headings) if name)
        first_line = self.text.partition("\n")[0].strip("# ")
        context = " > ".join(name for name in above if name != first_line)
        return f"{context}\n{self.text}" if context else self.text


class _Unit(NamedTuple):
    """The smallest piece that packing moves: text[start:end] and its number of tokens.

    level: 1-6 for a heading, 0 otherwise
    header: for a table's row, start and end of the table's header, if a chunk that begins with the row repeats it
    header_tokens: the header's number of tokens
    """

    start: int
    end: int
    tokens: int
    level: int
    header: tuple[int, int] | None = None
    header_tokens: int = 0


class _Span(NamedTuple):
    """The text of a chunk: text[start:end], below text[slice(*header)] if it has a header."""

    start: int
    end: int
    header: tuple[int, int] | None

    def text(self, text: str) -> str:
        above = text[slice(*self.header)].rstrip() + "\n" if self.header else ""
        return above + _clean(text, self.start, self.end)


class Chunker:
    """Cuts documents into chunks for a tokenizer. Deterministic and thread-safe."""

    def __init__(self, tokenizer: Any, config: ChunkerConfig | None = None) -> None:
        """Create a chunker. tokenizer: a transformers tokenizer. Raises ConfigError."""
        self.config = config or ChunkerConfig()
        self._tokens = ChunkTokenizer(tokenizer)

    @property
    def settings(self) -> dict[str, Any]:
        """Return everything that chunks depend on besides text and tokenizer. A part of a document's content hash."""
        return {"chunker": 1, **asdict(self.config)}

    def chunk_id(self, document_id: str, ordinal: int) -> str:
        return f"{document_id}#{ordinal}"

    def split(self, text: str, places: Sequence[Place] = ()) -> list[TextChunk]:
        """Return the chunks of a document, in order; none for white space.

        places: the pages, sheets or rows of its file that the text is from
        """
        text, places = edited(text, places, lambda part: part.replace("\r\n", "\n").replace("\r", "\n"))
        blank = len(text) - len(text.lstrip())
        text, places = text.strip(), [place._replace(start=max(0, place.start - blank)) for place in places]
        placed = PlaceIndex(text, places)
        outline = _Outline()
        groups = self._pack(self._units(text, map(outline.note, split_blocks(text))))
        groups = ([unit for unit in group if not text[unit.start : unit.end].isspace()] for group in groups)
        spans = (_Span(group[0].start, group[-1].end, group[0].header) for group in groups if group)
        return [
            TextChunk(
                span.text(text),
                ids,
                outline.above(span.start),
                _with_headings(outline.path(span.start), placed.between(span.start, span.end)),
            )
            for some in _batched(spans, lambda span: span.end - span.start)
            for span, ids in self._fitting(text, some)
        ]

    def _units(self, text: str, blocks: Iterable[Block]) -> Iterator[_Unit]:
        """Yield the blocks as units, and divide those that are too long.

        A block below headings or a table's header leaves room for them, because they share its chunk.
        """
        room = self.config.max_tokens - 1 - self.config.overlap
        headings, header, header_tokens = 0, None, 0
        counted = self._counted(blocks, lambda block: text[block.start : block.end])
        for block, tokens in counted:
            if block.header and block.header != header:
                ((_, header_tokens),) = self._counted([text[slice(*block.header)]], str)
            header = block.header
            unit = _Unit(block.start, block.end, tokens, block.level)
            if header and header_tokens <= room // 2:
                unit = unit._replace(header=header, header_tokens=header_tokens)
            above = max(headings, unit.header_tokens)
            limit = room - above if above <= room // 2 else room
            yield from self._divide(text, unit, limit, _PROSE_CUTS if block.is_prose else _LINE_CUTS)
            headings = headings + tokens if block.level else 0

    def _divide(self, text: str, unit: _Unit, limit: int, cuts: list[Callable[[str], list[str]]]) -> Iterator[_Unit]:
        """Yield the unit, or its pieces of at most `limit` tokens, cut as coarsely as possible."""
        if unit.tokens <= limit:
            yield unit
            return
        body = text[unit.start : unit.end]
        own = body.rstrip()  # a table's row may fit without the blank lines after it, which no chunk ends with
        if (unit.header or own.startswith("|")) and own != body and unit.tokens <= limit + len(body) - len(own):
            ((_, tokens),) = self._counted([own], str)
            if tokens <= limit:
                end = unit.start + len(own)
                yield unit._replace(end=end, tokens=tokens)
                yield _Unit(end, unit.end, unit.tokens - tokens, 0)
                return
        pieces: Iterable[str]
        if len(body) > MAX_BODY:
            pieces, finer = _parts(body), cuts
        else:
            pieces, finer = (cuts[0](body) if cuts else self._cut_characters(body, limit)), cuts[1:]
        start = unit.start
        for piece, tokens in self._counted(pieces, str):
            level = unit.level if start == unit.start else 0
            part = unit._replace(start=start, end=start + len(piece), tokens=tokens, level=level)
            start = part.end
            if cuts or len(body) > MAX_BODY:
                yield from self._divide(text, part, limit, finer)
            else:
                yield part

    def _counted(self, items: Iterable[T], text_of: Callable[[T], str]) -> Iterator[tuple[T, int]]:
        """Yield each item with its text's number of tokens.

        A text that is far too long for a chunk is given `max_tokens` + 1, because tokenising takes a hundred times the
        text's size in memory.
        """
        far_too_long = max(LONG_RUN, LONG_TOKEN * self.config.max_tokens)
        for some in _batched(items, lambda item: len(text_of(item))):
            LIMIT.get().check()
            texts = [whole_text if len(whole_text := text_of(item)) <= far_too_long else None for item in some]
            counts = iter(self._tokens.count([text for text in texts if text is not None]))
            for item, text in zip(some, texts, strict=True):
                yield item, self.config.max_tokens + 1 if text is None else next(counts)

    def _cut_characters(self, body: str, limit: int) -> Iterator[str]:
        """Yield pieces of at most `limit` tokens, but at least a character, of a word that is too long by itself."""
        start = 0
        while start < len(body):
            length = min(len(body) - start, 8 * limit)
            while (count := self._tokens.count([body[start : start + length]])[0]) > limit and length > 1:
                length = max(1, min(length - 1, length * limit // count))
            yield body[start : start + length]
            start += length

    def _pack(self, units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
        """Yield a group of units for each chunk: small sections are joined to the next, long sections cut evenly."""
        held: list[_Unit] = []  # the last group, which a tiny rest at the end joins
        current: list[_Unit] = []
        for section in _sections(units):
            full = []
            if current and _size(current) >= self.config.min_tokens:
                full, current = [current], []
            *more, current = self._cut_evenly(current + section)
            for group in [*full, *more]:
                if held:
                    yield held
                held = group
        is_tiny = bool(held) and _size(current) < self.config.min_tokens
        if is_tiny and _size(held + current) + held[0].header_tokens < self.config.max_tokens:
            held, current = [], held + current
        yield from (group for group in (held, current) if group)

    def _cut_evenly(self, section: list[_Unit]) -> list[list[_Unit]]:
        """Cut the section into as few groups as fit, all of similar size, so that the last is not a scrap."""
        room = self.config.max_tokens - 1
        if _size(section) <= room:
            return [section]
        room -= self.config.overlap
        above = max(unit.header_tokens for unit in section)  # each piece of a table repeats the header
        target = _size(section) / math.ceil(_size(section) / (room - above)) + above
        groups: list[list[_Unit]] = [[]]
        size = 0  # of the last group
        for unit in section:
            current = groups[-1]
            is_full = bool(current) and size >= target and not current[-1].level
            if current and (is_full or size + unit.tokens > room):
                groups.append(_take_headings(current))
                size = _size(groups[-1]) or unit.header_tokens
            groups[-1].append(unit)
            size += unit.tokens
        return [self._tail(before) + group for before, group in zip([[], *groups], groups, strict=False)]

    def _tail(self, group: list[_Unit]) -> list[_Unit]:
        """Return the last units of a group, which the next group repeats."""
        first = len(group)
        while first > 1 and _size(group[first - 1 :]) <= self.config.overlap:
            first -= 1
        return group[first:]

    def _fitting(self, text: str, spans: list[_Span]) -> Iterator[tuple[_Span, list[int]]]:
        """Yield spans with the token ids of their texts.

        The token counts of parts need not add up to the count of the whole. So each chunk is tokenised as a whole, and
        halved in the rare case that it is too long.
        """
        spans = [span for span in spans if text[span.start : span.end].strip()]
        for span, ids in zip(spans, self._tokens.encode([span.text(text) for span in spans]), strict=True):
            start, end = span.start, span.end
            if len(ids) <= self.config.max_tokens:
                yield span, ids
            elif end - start == 1:
                raise ConfigError(
                    f"max_tokens is {self.config.max_tokens}, but the tokenizer needs {len(ids)} for "
                    f"{text[start:end]!r}; raise max_tokens"
                )
            else:
                middle = _middle(text, start, end)
                yield from self._fitting(text, [span._replace(end=middle), span._replace(start=middle)])


def _parts(text: str) -> Iterator[str]:
    """Yield pieces of at most MAX_BODY characters, cut between words if possible."""
    start = 0
    while start < len(text):
        end = min(len(text), start + MAX_BODY)
        if end < len(text) and (space := re.search(r"\s\S*\Z", text[end - LONG_RUN : end])):
            end += space.start() + 1 - LONG_RUN
        yield text[start:end]
        start = end


def _words(text: str) -> list[str]:
    """Return the words, each with the white space before it."""
    return re.findall(r"\s*\S+|\s+\Z", text)


_PROSE_CUTS: list[Callable[[str], list[str]]] = [split_sentences, _words]
_LINE_CUTS: list[Callable[[str], list[str]]] = [partial(str.splitlines, keepends=True), split_sentences, _words]


def _sections(units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    """Yield sections: runs of units that begin at a heading or at the start of the text, MAX_UNITS units at most."""
    section: list[_Unit] = []
    for unit in units:
        if section and (unit.level or len(section) == MAX_UNITS):
            yield section
            section = []
        section.append(unit)
    if section:
        yield section


def _size(units: list[_Unit]) -> int:
    return sum(unit.tokens for unit in units)


def _take_headings(group: list[_Unit]) -> list[_Unit]:
    """Remove trailing headings from a group and return them: a heading goes with the text that follows it."""
    first = len(group)
    while first > 0 and group[first - 1].level:
        first -= 1
    if first == 0:
        return []  # the group has only headings: they stay
    taken = group[first:]
    del group[first:]
    return taken


def _clean(text: str, start: int, end: int) -> str:
    """Return the piece without blank lines around it, ending with one newline.

    Indentation is kept if the piece begins at the start of a line.
    """
    piece = text[start:end].rstrip()
    at_line_start = start == 0 or text[start - 1] == "\n"
    return (re.sub(r"\A(?:[^\S\n]*\n)+", "", piece) if at_line_start else piece.lstrip()) + "\n"


def _middle(text: str, start: int, end: int) -> int:
    """Return a position near the middle of a span to cut at, between words if possible."""
    middle = (start + end) // 2
    space = re.search(r"\s", text[middle : end - 1])
    return middle + space.end() if space else middle


def _with_headings(headings: tuple[str, ...], place: Mapping[str, Any]) -> dict[str, Any]:
    return {"headings": list(headings), **place} if headings else dict(place)


class _Outline:
    """Finds the headings above each chunk, while blocks and chunks are passed to it in order."""

    def __init__(self) -> None:
        self._coming: deque[Block] = deque()
        self._open: list[Block] = []

    def note(self, block: Block) -> Block:
        if block.level:
            self._coming.append(block)
        return block

    def above(self, position: int) -> tuple[str, ...]:
        """Return the titles of the sections that contain `position`, outermost first.

        Only headings that begin before `position` count.
        """
        while self._coming and self._coming[0].start < position:
            heading = self._coming.popleft()
            self._open = [*_below(self._open, heading), heading]
        # A heading at `position` closes its peers, and is itself part of the chunk.
        is_here = bool(self._coming) and self._coming[0].start == position
        return tuple(block.title for block in (_below(self._open, self._coming[0]) if is_here else self._open))

    def path(self, position: int) -> tuple[str, ...]:
        """Return the titles of the sections that contain the first text at `position`: those from `above`, then the
        headings at `position`, each deeper than the previous heading."""
        return (*self.above(position), *_first_headings(self._coming, position))


def headings_above(path: Sequence[str], text: str) -> tuple[str, ...]:
    """Return the headings above a chunk: its path without the headings that its own text begins with."""
    own = _first_headings(split_blocks(text), 0)
    return tuple(path[: -len(own)] if own and tuple(path[-len(own) :]) == own else path)


def _first_headings(blocks: Iterable[Block], position: int) -> tuple[str, ...]:
    """Return the titles of the adjacent headings from `position` on, each deeper than the previous heading."""
    found: list[Block] = []
    for block in blocks:
        level, end = (found[-1].level, found[-1].end) if found else (0, position)
        if block.level <= level or block.start != end:
            break
        found.append(block)
    return tuple(block.title for block in found)


def _below(open_sections: list[Block], heading: Block) -> list[Block]:
    """Return the open sections that a heading does not end."""
    return [above for above in open_sections if above.level < heading.level]


def _batched(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists of about BATCH_CHARS characters, BATCH_TEXTS items at most."""
    some: list[T] = []
    size = 0
    for item in items:
        some.append(item)
        size += size_of(item)
        if size >= BATCH_CHARS or len(some) == BATCH_TEXTS:
            yield some
            some, size = [], 0
    if some:
        yield some
